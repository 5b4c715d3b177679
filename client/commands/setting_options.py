"""The options of `trident serve` that are settings of the engine."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from engine.launch.arguments import setting_flags


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**settings` one option per field of EngineConfig.

    Values are taken as strings: EngineConfig itself converts and checks them, so that a flag, a
    variable and `engine.json` obey the same rules. A boolean is `--field` or `--no-field`.
    """
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, field in EngineConfig.model_fields.items():
        default = "" if field.default is None else f" [default: {field.default}]"
        text = f"{field.description}{default}"
        annotation: Any
        if field.annotation in (bool, bool | None):
            flag = setting_flags()[name][0]
            option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text)
            annotation = Annotated[bool | None, option]
        else:
            option = typer.Option(*setting_flags()[name], help=text, metavar="VALUE")
            annotation = Annotated[str | None, option]
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
