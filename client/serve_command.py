"""`trident serve` as the terminal shows it: loading, the addresses, then what goes wrong."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from client import server_log
from client.serve import MODEL, TritonServer
from client.server_display import ServerLog, stopped_by_signals
from engine.demo.prompts import DEMO_PROMPTS


def serve(
    settings: Mapping[str, Any],
    arguments: Sequence[str],
    repository: Path | None,
    console: Console,
) -> int:
    """Run a server until it is told to stop; return the exit status of the command.

    Raises:
        ServerStartError: it cannot be started.
    """
    display = ServerLog(console, everything=not console.is_terminal)
    server = TritonServer(
        settings, arguments=arguments, repository=repository, on_line=display.show
    )
    with stopped_by_signals():
        try:
            server.prepare()
            with display.loading(f"Starting Triton with {server.config.model}"):
                server.start()
            _announce(server, display.description, console)
            status = server.follow()
        except KeyboardInterrupt:
            if not display.is_loaded:
                return 130
            console.print("Stopping ...", highlight=False)
            return 0
        finally:
            server.stop()
    reason, hint = server_log.failure(server.log)
    console.print(f"[red]tritonserver died (exit status {status}):[/] {escape(reason)}")
    if hint:
        console.print(escape(hint))
    return 1


def curl_line(server: TritonServer) -> str:
    """Return a command line that asks `server` something it can answer."""
    body: dict[str, Any] = {"max_tokens": 64, "exclude_input_in_output": True}
    if server.config.model == "demo":
        body = {"messages": json.dumps([{"role": "user", "content": DEMO_PROMPTS[0]}])} | body
    else:
        body = {"text_input": "The capital of France is"} | body
    url = f"{server.http_url}/v2/models/{MODEL}/generate"
    return f"curl -s {url} -d {shlex.quote(json.dumps(body))}"


def _announce(server: TritonServer, description: str, console: Console) -> None:
    def line(text: str = "") -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(f"[bold green]Trident is ready.[/] {escape(description)}")
    line()
    urls = {
        "grpc": ("gRPC", f'{{}}  [dim](model "{MODEL}"; TridentClient("{{}}"))[/]'),
        "http": ("HTTP", f"http://{{}}/v2/models/{MODEL}/generate [dim]and[/] /generate_stream"),
        "metrics": ("metrics", "http://{}/metrics"),
    }
    for name, (title, address) in urls.items():
        if name in server.endpoints:
            line(f"  {title:<8} {address.replace('{}', server.endpoints[name].url)}")
    line(f"  {'log':<8} {server.log_path}")
    line()
    if "http" in server.endpoints:
        line("Try it:")
        console.out(curl_line(server), highlight=False)
    if "grpc" in server.endpoints:
        console.out(f"trident chat --url {server.grpc_url}", highlight=False)
    line()
    line("[dim]Ctrl-C stops the server.[/]")
