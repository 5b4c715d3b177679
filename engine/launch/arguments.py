"""The flags of `trident serve`: its own, and those of tritonserver that the launcher reads."""

import difflib
from collections.abc import Sequence
from itertools import chain

from engine.config.engine_config import EngineConfig
from engine.launch.errors import ServerStartError
from engine.launch.ports import Endpoint, pick_free
from engine.validation import unsupported

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
EXIT_TIMEOUT = "--exit-timeout-secs"
DEFAULT_EXIT_TIMEOUT_S = 5
DEFAULTS = (
    # Of its metrics of processors. An ending tritonserver waits for the next time, by default 2 s.
    "--metrics-interval-ms=250",
    # Of each model, to take responses from its stub. The default of 32 take turns, so that their
    # memory is never in a cache: tritonserver's part of a response costs 5 % more. The engine's
    # stub has two threads that send; what others ask or answer now and then waits for one of them.
    "--backend-config=python,thread-pool-size=2",
)
# What spares tritonserver the search for a GPU where there is none, and its complaints.
WITHOUT_GPU = ("--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false")

# The launcher sets these itself; given twice, tritonserver silently uses one of them.
_RESERVED = ("--model-repository", "--model-store", "--backend-directory")


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value given for `flag`, as `--flag value` or `--flag=value`; else None."""
    value = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        elif argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value


def split_model(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split what `trident serve` does not know itself into the model, or None, and the flags.

    The model is the word that is neither a flag nor the value of one. A flag of tritonserver has a
    value; one that no value follows is left for tritonserver to refuse.

    Raises:
        ServerStartError: there is more than one such word.
    """
    models: list[str] = []
    flags: list[str] = []
    needs_value = False
    for word in words:
        is_flag = _is_flag(word)
        (flags if is_flag or needs_value else models).append(word)
        needs_value = is_flag and "=" not in word
    if len(models) > 1:
        raise ServerStartError(f"only one model can be served (got {' and '.join(models)})")
    return (models[0] if models else None), flags


def is_off(arguments: Sequence[str], flag: str) -> bool:
    """Return whether a boolean flag that is on by default is switched off."""
    return (value_of(arguments, flag) or "true").lower() in ("0", "false", "off")


def as_flag(name: str) -> str:
    """Return the flag of the setting `name`."""
    return f"--{name.replace('_', '-')}"


def setting_flags() -> dict[str, tuple[str, ...]]:
    """Return the flags of every field of EngineConfig, its own name first."""
    return {
        field: tuple(as_flag(name) for name in EngineConfig.names(field))
        for field in EngineConfig.model_fields
    }


def check(arguments: Sequence[str]) -> None:
    """Refuse what the launcher sets itself, and misspelt settings.

    Raises:
        ServerStartError: naming the argument.
    """
    own = [*chain.from_iterable(setting_flags().values()), *map(as_flag, unsupported.SETTINGS)]
    for flag in (each.partition("=")[0] for each in arguments if _is_flag(each)):
        if flag in _RESERVED:
            raise ServerStartError(f"{flag} is set by trident itself; leave it out")
        # vLLM's scripts may have its underscores, which no flag of tritonserver has.
        if similar := difflib.get_close_matches(flag.replace("_", "-"), own, n=1, cutoff=0.9):
            raise ServerStartError(f"unknown flag {flag}", f"did you mean {similar[0]}?")
        if not flag.startswith("--"):  # tritonserver would not name the unknown one
            raise ServerStartError(f"unknown flag {flag}", "see trident serve --help")


def endpoints(
    arguments: Sequence[str], default_port: int | None = None, host: str = DEFAULT_HOST
) -> tuple[dict[str, Endpoint], list[str]]:
    """Return tritonserver's services by name, and the arguments with address and port of each.

    A service that is switched off is left out. Port 0 means: choose a free one; services without
    a port get `default_port`, or tritonserver's own default if that is None. Those without an
    address listen on `host`.

    Raises:
        ServerStartError: a port is no number of 0..65535.
    """
    ports: dict[str, int] = {}
    for name, default in DEFAULT_PORTS.items():
        if not is_off(arguments, f"--allow-{name}"):
            flag, unset = f"--{name}-port", default if default_port is None else default_port
            ports[name] = _port(flag, value_of(arguments, flag) or str(unset))
    free = iter(pick_free(len(ports), taken=[*ports.values()]))
    filled = list(arguments)
    services: dict[str, Endpoint] = {}
    for name, given in ports.items():
        flag, port = f"--{name}-port", given or next(free)
        address = value_of(arguments, f"--{name}-address")
        if address is None and name == "metrics":  # as tritonserver does
            address = value_of(arguments, "--http-address")
        services[name] = Endpoint(name, address or host, port)
        # The last one counts.
        filled += [f"{flag}={port}", f"--{name}-address={services[name].address}"]
    return services, filled


def exit_timeout(arguments: Sequence[str]) -> int:
    """Return the seconds that requests in flight have when the server is stopped.

    Raises:
        ServerStartError: `--exit-timeout-secs` is no number of seconds.
    """
    text = value_of(arguments, EXIT_TIMEOUT)
    if text is None:
        return DEFAULT_EXIT_TIMEOUT_S
    if not text.isascii() or not text.isdigit():
        raise ServerStartError(f"{EXIT_TIMEOUT} must be a number of seconds (got {text!r})")
    return int(text)


def _is_flag(word: str) -> bool:
    """Whether it is not a value; a negative number is one."""
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _port(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ServerStartError(f"{flag} must be a port number of 0 to 65535 (got {text!r})")
    return int(text)
