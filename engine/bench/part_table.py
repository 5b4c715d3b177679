"""Rows of the table of parts: their figures next to floors and aims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.bench.decode import Decode
from engine.bench.floors import Ceilings
from engine.bench.offline import Offline
from engine.bench.part import Figures, TimedPart
from engine.bench.transformers_peer import ContinuousBatching
from kernels.bench.case import Aim
from kernels.bench.table import verdict

PEER_FACTOR = 5.0  # target speed-up over transformers' continuous batching
HEADER = ("", "ms", "tok/s", "floor ms", "share", "aim", "")
TEXT = (0, 5, 6)  # columns of text


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; seconds and shares, or None."""

    name: str
    seconds: float | None = None
    tokens_per_second: float | None = None
    floor_seconds: float | None = None
    share: float | None = None
    aim: str | None = None
    met: bool | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the line's cells, for `HEADER`."""
        return (
            self.name,
            _milliseconds(self.seconds),
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            _milliseconds(self.floor_seconds),
            "" if self.share is None else f"{self.share:.0%}",
            self.aim or "",
            verdict(self.met),
        )


def rows(
    part: TimedPart, figures: Mapping[str, Figures], ceilings: Ceilings, *, judged: bool
) -> Iterator[Row]:
    """Yield the lines of a measured part.

    Args:
        figures: of all parts, by key.
        judged: compare them with the aims.
    """
    found = figures[part.key]
    seconds = found["seconds"]
    floor = part.floor(found, ceilings) if ceilings else None
    share = floor / seconds if floor else None
    aim = part.aim if judged else None
    yield Row(
        name=f"{part.shape.name}, {part.name}",
        seconds=seconds,
        tokens_per_second=found.get("tokens_per_second"),
        floor_seconds=floor,
        share=share,
        aim=_aim(aim),
        met=aim.met(1e6 * seconds, share) if aim else None,
    )
    if isinstance(part, Decode) and found["host_seconds"] is not None:
        seconds = found["host_seconds"]
        aim = part.host_aim if judged else None
        yield Row(
            name=f"{part.shape.name}, {part.name}: of it the host's work",
            seconds=seconds,
            aim=_aim(aim),
            met=aim.met(1e6 * seconds, None) if aim else None,
        )
    if isinstance(part, Offline) and part.session == "transformers":
        ours = figures.get(Offline(part.shape, part.workload, part.count, 0.0).key, {})
        if ours.get("status") == "measured":
            factor = ours["tokens_per_second"] / found["tokens_per_second"]
            judged = judged and isinstance(part, ContinuousBatching)
            yield Row(
                name=f"{part.shape.name}, the engine is {factor:.2f}x as fast",
                aim=f">= {PEER_FACTOR:.0f}x" if judged else None,
                met=factor >= PEER_FACTOR if judged else None,
            )


def _aim(aim: Aim | None) -> str | None:
    if aim is None:
        return None
    return f"<= {aim.micros / 1e3:g} ms" if aim.micros is not None else str(aim)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
