"""Options of `trident run`, `chat` and `health`: the server's address, TLS, headers."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from client.client import TridentClient
from client.connection import SSLOptions
from client.errors import ConfigurationError
from client.request import ENSEMBLE

Url = Annotated[
    str,
    typer.Option("--url", envvar="TRIDENT_URL", help="gRPC address of the server, host:port."),
]
ServedName = Annotated[
    str,
    typer.Option(
        "--served-model-name", envvar="TRIDENT_SERVED_MODEL_NAME", help="The model's name there."
    ),
]
TLS = Annotated[bool, typer.Option("--tls", envvar="TRIDENT_TLS", help="Speak TLS.")]
TLSAuthorities = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="TRIDENT_TLS_CA",
        help="Authorities that the server's certificate may come from (PEM); implies --tls.",
    ),
]
TLSCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar="TRIDENT_TLS_CERT", help="Our certificate, if the server wants one."
    ),
]
TLSKey = Annotated[
    Path | None, typer.Option("--tls-key", envvar="TRIDENT_TLS_KEY", help="The key of it.")
]
TLSName = Annotated[
    str | None,
    typer.Option(
        "--tls-name",
        envvar="TRIDENT_TLS_NAME",
        help="Name in the server's certificate, if the address has another.",
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="Sent with each call; repeatable."),
]


def connect(
    url: Url = "localhost:8001",
    served_model_name: ServedName = ENSEMBLE,
    tls: TLS = False,
    tls_ca: TLSAuthorities = None,
    tls_cert: TLSCertificate = None,
    tls_key: TLSKey = None,
    tls_name: TLSName = None,
    header: Header = None,
) -> TridentClient:
    """Return a client of the server that the options name.

    Raises:
        ConfigurationError: an option is wrong.
    """
    ssl = ssl_options(tls, tls_ca, tls_cert, tls_key, tls_name)
    headers = dict(header_pairs(header or ()))
    return TridentClient(url, model=served_model_name, ssl=ssl, headers=headers)


def ssl_options(
    tls: bool, ca: Path | None, cert: Path | None, key: Path | None, name: str | None
) -> bool | SSLOptions:
    """Return what the options of TLS say; one of them implies it."""
    given = SSLOptions(ca, key, cert, name)
    return given if tls or given != SSLOptions() else False


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is a `TridentClient`, the options of `connect`.

    The client is closed when the command ends.
    """
    options = inspect.signature(connect).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**arguments: Any) -> None:
        with connect(**{name: arguments.pop(name) for name in options}) as client:
            command(client, **arguments)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY) if p.default is not p.empty else p
        for p in [*own, *options.values()]
    ]
    cast(Any, run).__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def header_pairs(headers: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield name and value of each `NAME=VALUE`.

    Raises:
        ConfigurationError: one is not of that form.
    """
    for header in headers:
        name, separator, value = header.partition("=")
        if not separator:
            raise ConfigurationError(f"--header {name}: must be NAME=VALUE")
        yield name, value
