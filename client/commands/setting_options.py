"""The options of `trident serve` that are settings of the engine."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from engine.config.engine_config import EngineConfig
from engine.launch.arguments import as_flag, setting_flags
from engine.validation import unsupported

# vLLM's, by setting.
_SHORT_FLAGS = {
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**settings` one option per field of EngineConfig.

    Values are taken as strings: EngineConfig itself converts and checks them, so that a flag, a
    variable and `engine.json` obey the same rules. A boolean is `--field` or `--no-field`. Those of
    vLLM that Trident does not have are taken too, so that it is EngineConfig that refuses them.
    """
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, field in EngineConfig.model_fields.items():
        default = "" if field.default is None else f" [default: {field.default}]"
        text = f"{field.description}{default}"
        is_boolean = field.annotation in (bool, bool | None)
        parameters.append(_option(name, setting_flags()[name], is_boolean, help=text))
    for name, neutral in unsupported.SETTINGS.items():
        is_boolean = any(isinstance(value, bool) for value in neutral)
        parameters.append(_option(name, (as_flag(name),), is_boolean, hidden=True))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _option(
    name: str, flags: tuple[str, ...], is_boolean: bool, **options: Any
) -> inspect.Parameter:
    annotation: Any
    if is_boolean:
        option = typer.Option(f"{flags[0]}/--no-{flags[0][2:]}", **options)
        annotation = Annotated[bool | None, option]
    else:
        short = [_SHORT_FLAGS[name]] if name in _SHORT_FLAGS else []
        option = typer.Option(*flags, *short, metavar="VALUE", **options)
        annotation = Annotated[str | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
