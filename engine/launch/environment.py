"""The environment variables of tritonserver, including the engine's settings."""

import json
import os
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from engine.config.engine_config import ENV_PREFIX, EngineConfig
from engine.errors import ConfigError
from engine.launch.errors import ServerStartError
from engine.launch.security import ADMIN_KEY

RUN_ID = "TRIDENT_RUN_ID"
_KEPT_BACK = ("PYTHONHOME", ADMIN_KEY)  # no model needs the key


def settings_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the `TRIDENT_<FIELD>` variables that hand `settings` to the engine.

    Args:
        settings: fields of EngineConfig by name or alias; None counts as not given.

    Raises:
        ServerStartError: a setting is unknown or wrong.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        chosen = EngineConfig.parse(given).model_dump(mode="json", exclude_unset=True)
    except ConfigError as error:
        raise ServerStartError(str(error)) from None
    return {ENV_PREFIX + name.upper(): _as_text(value) for name, value in chosen.items()}


def effective_config(model_repository: Path, environ: Mapping[str, str]) -> EngineConfig:
    """Return the settings that the engine will run with.

    Raises:
        ServerStartError: `engine.json` or a `TRIDENT_*` variable is wrong.
    """
    path = model_repository / "engine" / "1" / "engine.json"
    try:
        if path.exists():
            return EngineConfig.load(path, environ)
        return EngineConfig.parse(EngineConfig.overrides(environ))
    except ConfigError as error:
        raise ServerStartError(str(error)) from None


def server_environment(
    base: Mapping[str, str], *, run_id: str, libraries: tuple[Path, ...], settings: dict[str, str]
) -> dict[str, str]:
    """Return `base` with the variables that tritonserver and its models need.

    Raises:
        ServerStartError: the running interpreter's folder has another one named `python3`.
    """
    environment = {name: value for name, value in base.items() if name not in _KEPT_BACK}
    # Stubs find site-packages through the first python3 on PATH, whatever VIRTUAL_ENV is.
    environment["PATH"] = _path(interpreter_folder(), after=base.get("PATH", os.defpath))
    environment["LD_LIBRARY_PATH"] = _path(*libraries, after=base.get("LD_LIBRARY_PATH", ""))
    # glibc gives each of tritonserver's many threads an arena that never shrinks: its memory crept
    # up under mixed load by 30 MiB an hour, and is flat with two arenas.
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    # Threads free what others have allocated, several times per response. With tcmalloc the stages
    # carry a tenth more of them; tritonserver's container has it.
    if allocator := find_library("tcmalloc_minimal"):
        environment.setdefault("LD_PRELOAD", allocator)
    return {**environment, **settings, RUN_ID: run_id}


def _path(*folders: Path, after: str) -> str:
    """Return a list of `folders`, then those of `after`; an empty one is the working directory."""
    return os.pathsep.join([*map(str, folders), *filter(None, after.split(os.pathsep))])


def interpreter_folder(executable: Path = Path(sys.executable)) -> Path:
    """Return the folder whose `python3` is the running interpreter.

    Raises:
        ServerStartError: there is none, so the models would run in another environment.
    """
    python3 = executable.parent / "python3"
    if python3.exists() and python3.resolve() == executable.resolve():
        return executable.parent
    raise ServerStartError(
        f"{python3} is not the Python that runs trident ({executable.name}): Triton's Python "
        "backend would load the packages of the wrong Python",
        "install trident into a virtual environment (python -m venv .venv) and run it from there",
    )


def _as_text(value: Any) -> str:
    if value is None:  # of `max_model_len` alone: an empty variable would leave that of a file
        return "auto"
    return json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
