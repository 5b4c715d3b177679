"""Commands whose modules are imported when they run: `trident --help` needs none of them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from client.errors import ConfigurationError


class LazyCommand(TyperCommand):
    """Stands for the command, or group of commands, that `app` of a module defines.

    Args:
        name: the command's name.
        module: the module with the `typer.Typer` object `app`.
        help: what the list of commands says; the same as the first line of the command's own help.
    """

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse `args` with the command itself: from here on the context's command is that one.

        Raises:
            ConfigurationError: a package that the command needs is not installed.
        """
        try:
            app: typer.Typer = import_module(self._module).app
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"trident {self.name} needs the Python package {error.name}, which is not installed"
            ) from None
        command = typer.main.get_command(app)
        return command.make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """A group whose commands are those of `modules`: name -> (module, help), in this order."""

    modules: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (module, help) in self.modules.items():
            self.add_command(LazyCommand(name, module, help))
