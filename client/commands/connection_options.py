"""Options of the commands that speak with servers: their address, TLS, headers."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer

from client.client import TridentClient
from client.client_protocol import ClientProtocol
from client.connection import SSLOptions
from client.errors import ConfigurationError
from client.gateway_client import GatewayClient
from client.http_connection import is_http
from client.request import ENSEMBLE

T = TypeVar("T")

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="TRIDENT_URL",
        help="Server address: host:port of its gRPC service, or http://host:port of a gateway.",
    ),
]
APIKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="TRIDENT_API_KEY",
        help="API key for the gateway; of several, the first is used.",
        show_default=False,
    ),
]
ServedName = Annotated[
    str,
    typer.Option(
        "--served-model-name",
        envvar="TRIDENT_SERVED_MODEL_NAME",
        help="Name of the model on the server.",
    ),
]
TLS = Annotated[bool, typer.Option("--tls", envvar="TRIDENT_TLS", help="Use TLS.")]
TLSAuthorities = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="TRIDENT_TLS_CA",
        help="CA certificates to verify the server with (PEM); implies --tls.",
    ),
]
TLSCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="TRIDENT_TLS_CERT",
        help="Client certificate (PEM), if the server requires one.",
    ),
]
TLSKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", envvar="TRIDENT_TLS_KEY", help="Private key of the client certificate (PEM)."
    ),
]
TLSName = Annotated[
    str | None,
    typer.Option(
        "--tls-name",
        envvar="TRIDENT_TLS_NAME",
        help="Name to expect in the server's certificate, if it differs from the address.",
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        "--header", metavar="NAME=VALUE", help="Header to send with each request; repeatable."
    ),
]


@dataclass(frozen=True)
class Access:
    """How servers are spoken to.

    Attributes:
        model: the name under which they serve the model.
        ssl: TLS with them.
        headers: sent with each call.
    """

    model: str
    ssl: bool | SSLOptions
    headers: Mapping[str, str]


def access(
    served_model_name: ServedName = ENSEMBLE,
    tls: TLS = False,
    tls_ca: TLSAuthorities = None,
    tls_cert: TLSCertificate = None,
    tls_key: TLSKey = None,
    tls_name: TLSName = None,
    header: Header = None,
) -> Access:
    """Return the access that the options ask for; one of those of TLS implies it.

    Raises:
        ConfigurationError: an option is wrong.
    """
    # Here by the names of the options; the client has those of its arguments.
    if (tls_cert is None) != (tls_key is None):
        raise ConfigurationError("--tls-cert and --tls-key must be given together")
    for option, path in (("--tls-ca", tls_ca), ("--tls-cert", tls_cert), ("--tls-key", tls_key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}", param=option) from None
    ssl = SSLOptions(tls_ca, tls_key, tls_cert, tls_name)
    headers = dict(_header_pairs(header or ()))
    return Access(served_model_name, ssl if tls or ssl != SSLOptions() else False, headers)


def with_options(make: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a function, whose first parameter is what `make` returns, the options of `make`.

    What `make` returns is closed when the function ends, if it can be.
    """
    options = inspect.signature(make).parameters

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        own = list(inspect.signature(function).parameters.values())[1:]

        def run(**arguments: Any) -> T:
            made = make(**{name: arguments.pop(name) for name in options})
            closed = made if isinstance(made, AbstractContextManager) else nullcontext(made)
            with closed as first:
                return function(first, **arguments)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY) if p.default is not p.empty else p
            for p in [*own, *options.values()]
        ]
        cast(Any, run).__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


@with_options(access)
def connect(given: Access, url: Url = "localhost:8001", api_key: APIKey = "") -> ClientProtocol:
    """Return a client of the server or the gateway that the options name.

    Raises:
        ConfigurationError: an option is wrong.
    """
    if is_http(url):
        return GatewayClient(
            url,
            model=None if given.model == ENSEMBLE else given.model,
            api_key=next(iter(api_key.split()), ""),
            ssl=given.ssl,
            headers=given.headers,
        )
    return TridentClient(url, model=given.model, ssl=given.ssl, headers=given.headers)


def _header_pairs(headers: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield name and value of each `NAME=VALUE`.

    Raises:
        ConfigurationError: one is not of that form.
    """
    for header in headers:
        name, separator, value = header.partition("=")
        if not separator:
            raise ConfigurationError("must be NAME=VALUE", param=f"--header {name}")
        yield name, value
