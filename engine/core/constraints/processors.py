"""The logits processors of an engine: those of installed packages, and those that a request has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from engine.core.constraints.dry import Dry, DryArgs
from engine.errors import ConfigError, RequestError, TridentError
from engine.logits_processors import (
    ENTRY_POINTS,
    LogitsProcessor,
    ProcessorContext,
    ProcessorRow,
)
from engine.request.sampling_params import SamplingParams
from engine.validation.limits import MAX_DRY_TOKENS

log = logging.getLogger("trident.engine")


@dataclass(slots=True)
class AskedProcessor:
    """A processor that one sequence asks for.

    Attributes:
        field: of the request, that asks for it.
        fault: why the request fails, once the processor has failed.
    """

    field: str
    processor: LogitsProcessor
    row: ProcessorRow
    fault: TridentError | None = None

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            raise self.fault


def load_processors(context: ProcessorContext) -> dict[str, LogitsProcessor]:
    """Return the processors of the installed packages, by name, and log them.

    Raises:
        ConfigError: one cannot be made, or two have the same name.
    """
    found: dict[str, LogitsProcessor] = {}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "no package"
        shown = f"logits processor {point.name!r} ({point.value}, {package})"
        if point.name in found:
            raise ConfigError(
                "another installed package has a processor of the same name; uninstall one of them",
                param=shown,
            )
        try:
            found[point.name] = point.load()(context)
        except Exception as error:
            raise ConfigError(
                f"cannot be loaded: {type(error).__name__}: {error}", param=shown
            ) from error
        log.info("%s", shown)
    return found


class Processors:
    """Finds the processors that a request asks for, and has them check its arguments."""

    def __init__(
        self, installed: Mapping[str, LogitsProcessor], text_of: Callable[[int], str]
    ) -> None:
        """`text_of` returns the text of a token alone."""
        self._installed = installed
        self._dry = Dry(text_of)

    def asked(self, params: SamplingParams) -> list[AskedProcessor]:
        """Return the processors for one sequence of a request.

        Raises:
            RequestError: there is no such processor, or it refuses its arguments.
        """
        asked = [
            AskedProcessor(f"logits_processors.{each.name}", self._installed[each.name], row)
            for each in params.logits_processors
            for row in [ProcessorRow(each.args)]
        ]
        last_n = params.dry_penalty_last_n
        if params.dry_multiplier > 0 and last_n != 0:
            args = DryArgs(
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed_length=params.dry_allowed_length,
                last_n=MAX_DRY_TOKENS if last_n < 0 else min(last_n, MAX_DRY_TOKENS),
                breakers=params.dry_sequence_breakers,
            )
            asked.append(AskedProcessor("dry_multiplier", self._dry, ProcessorRow(args)))
        return asked

    def check(self, params: SamplingParams) -> None:
        """Have the processors that a request asks for check its arguments.

        Raises:
            RequestError: there is no such processor, or it refuses its arguments.
        """
        for index, each in enumerate(params.logits_processors):
            field = f"logits_processors[{index}]"
            processor = self._installed.get(each.name)
            if processor is None:
                names = ", ".join(map(repr, self._installed)) or "none"
                raise RequestError(
                    f"there is no logits processor {each.name!r}; installed: {names}",
                    param=f"{field}.name",
                )
            self._validate(field, processor, each.args)

    def _validate(self, field: str, processor: LogitsProcessor, args: dict[str, Any]) -> None:
        try:
            processor.validate(args)
        except ValueError as error:
            raise RequestError(str(error), param=f"{field}.args") from None
        except Exception as error:
            log.exception("%s.args: the processor failed to check its arguments", field)
            raise RequestError(
                f"the processor failed to check its arguments: {type(error).__name__}",
                param=f"{field}.args",
            ) from error
