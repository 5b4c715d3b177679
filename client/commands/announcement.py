"""What `trident serve` says when its server is ready: addresses, security, what to try."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

from client.commands.gateway_process import GatewayOptions, model_names
from engine.demo.prompts import DEMO_PROMPTS
from engine.launch.arguments import DEFAULT_HOST
from engine.launch.model_configs import ENSEMBLE
from engine.launch.ports import Endpoint
from engine.launch.security import ADMIN_KEY, GRPC_HEADER, HTTP_HEADER
from engine.launch.server import TritonServer
from engine.protocol.messages import FOR_EMBEDDINGS


def announce(
    server: TritonServer,
    gateway: Endpoint | None,
    options: GatewayOptions,
    description: str,
    console: Console,
) -> None:
    """Print how to reach `server`, and its gateway if there is one.

    Args:
        server: which has been started.
        gateway: where its gateway listens.
        options: of its gateway.
        description: of the model, in a line.
        console: to print to.
    """

    def line(text: str = "") -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(f"[bold green]Trident is ready.[/] {escape(description)}")
    line()
    named = f', model="{server.model}"' if server.model != ENSEMBLE else ""
    arguments = named + (", ssl=True" if server.tls else "")
    urls = {
        "grpc": (
            "gRPC",
            f"{{}}{' with TLS' if server.tls else ''}  "
            f'[dim](model "{server.model}"; '
            f'TridentClient("{{}}"{arguments}))[/]',
        ),
        "http": (
            "HTTP",
            f"http://{{}}/v2/models/{server.model}/generate [dim]and[/] /generate_stream",
        ),
        "metrics": ("metrics", "http://{}/metrics"),
    }
    for name, (title, address) in urls.items():
        if name in server.endpoints:
            line(f"  {title:<8} {address.replace('{}', server.endpoints[name].url)}")
    if gateway is not None:
        names = ", ".join(f'"{name}"' for name in model_names(server))
        line(f"  {'OpenAI':<8} http://{gateway.url}/v1  [dim](model {escape(names)})[/]")
        line(f"  {'browser':<8} http://{gateway.url}/  [dim](chat, dashboard)[/]")
    line(f"  {'log':<8} {server.log_path}")
    line()
    lets_everybody_in = gateway is not None and not options.asks_for_key()
    for text in _security(server, lets_everybody_in):
        line(f"[dim]{escape(text)}[/]")
    line()
    embeds = description.endswith(FOR_EMBEDDINGS)
    if "http" in server.endpoints:
        line("Try it:")
        console.out(curl_line(server, embeds=embeds), highlight=False)
    if "grpc" in server.endpoints and not server.tls and not embeds:
        console.out(f"{own_name()} chat --url {server.grpc_url}", highlight=False)
    line()
    line("[dim]Ctrl-C stops the server.[/]")


def curl_line(server: TritonServer, *, embeds: bool = False) -> str:
    """Return a command line that asks `server` something it can answer.

    Args:
        embeds: its model does nothing else.
    """
    body: dict[str, Any] = {"max_tokens": 64, "exclude_input_in_output": True}
    if embeds:
        sampling = json.dumps({"return_embedding": True})
        body = {"text_input": "a fox", "sampling_parameters": sampling}
    elif server.config.model == "demo":
        body = {"messages": json.dumps([{"role": "user", "content": DEMO_PROMPTS[0]}])} | body
    else:
        body = {"text_input": "The capital of France is"} | body
    url = f"{server.http_url}/v2/models/{server.model}/generate"
    return f"curl -s {url} -d {shlex.quote(json.dumps(body))}"


def own_name() -> str:
    """Return what starts this command in the user's shell, whose PATH need not have it."""
    return "trident" if shutil.which("trident") else shlex.quote(sys.argv[0])


def _security(server: TritonServer, lets_everybody_in: bool) -> Iterator[str]:
    """Yield what the operator should know of who can do what, one line each."""
    if any(each.address == DEFAULT_HOST for each in server.endpoints.values()):
        yield "Other machines reach it with --host 0.0.0.0 only."
    if lets_everybody_in:
        yield "OpenAI's port lets everybody in; set TRIDENT_API_KEY to a key that it is to ask for."
    if server.administration_open:
        yield (
            f"Administration (model repository, shared memory, trace, logging) wants the header "
            f"{HTTP_HEADER} (gRPC: {GRPC_HEADER})."
        )
    else:
        yield f"Administration is closed; to open it, set {ADMIN_KEY} and send it as {HTTP_HEADER}."
    if server.tls and "http" in server.endpoints:
        yield (
            "gRPC is encrypted, HTTP is not: tritonserver has no TLS for it. Put a proxy before it "
            "(--http-address=127.0.0.1), or switch it off (--allow-http=false)."
        )
