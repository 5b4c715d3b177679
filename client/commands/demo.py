"""`trident demo`: the real server, several questions at the same moment, answered side by side."""

import asyncio
from contextlib import aclosing

import typer
from rich.live import Live
from rich.markup import escape

from client.aio import AsyncTridentClient
from client.commands.demo_display import DemoRequest, answers, figures, frame
from client.commands.server_display import ServerLog, stopped_by_signals
from client.errors import TridentClientError
from engine.console import Console
from engine.demo.prompts import DEMO_PROMPTS
from engine.launch.server import TritonServer

_NUM_QUESTIONS = 8
_MAX_TOKENS = 160
_FRAMES_PER_S = 12

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command() -> None:
    """Start the server on the bundled model and ask it several questions at once."""
    raise typer.Exit(run(Console()))


def run(console: Console) -> int:
    """Run the demo from start to clean end; return the exit status of the command.

    Raises:
        ServerStartError: the server cannot be started.
    """
    requests = [DemoRequest(number, text) for number, text in enumerate(_chosen(), start=1)]
    log = ServerLog(console)
    server = TritonServer({"model": "demo"}, ports=0, on_line=log.show)
    with stopped_by_signals():
        try:
            with log.loading("Starting Triton Inference Server"):
                server.start()
            _say(console, f"[bold green]Trident is ready.[/] {escape(log.description)}")
            _say(console, f"{len(requests)} questions at the same moment over gRPC:")
            asyncio.run(_ask_all(server, requests, console))
        finally:
            server.stop()
    console.print(figures(requests, console.width))
    failed = [each for each in requests if each.problem]
    for each in failed:
        _say(console, f"[red]{each.number}: {escape(each.problem)}[/]")
    return 1 if failed else 0


def _chosen() -> tuple[str, ...]:
    return DEMO_PROMPTS[:_NUM_QUESTIONS]


async def _ask_all(server: TritonServer, requests: list[DemoRequest], console: Console) -> None:
    async with AsyncTridentClient(server.grpc_url, model=server.model) as client:
        if not console.is_terminal:
            await asyncio.gather(*(_ask(client, each, console) for each in requests))
            return
        with Live(console=console, auto_refresh=False, transient=True) as live:
            async with asyncio.TaskGroup() as group:  # which ends the requests on Ctrl-C
                asking = [group.create_task(_ask(client, each, None)) for each in requests]
                while not all(task.done() for task in asking):
                    live.update(frame(requests, console.size), refresh=True)
                    await asyncio.wait(asking, timeout=1 / _FRAMES_PER_S)
        console.print(answers(requests, console.width))


async def _ask(client: AsyncTridentClient, request: DemoRequest, console: Console | None) -> None:
    """Have one request answered, and report it line by line on `console` if there is one."""
    messages = [{"role": "user", "content": request.text}]
    stream = client.stream(messages=messages, max_tokens=_MAX_TOKENS, temperature=0.0)
    request.start()
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                is_first = request.add(chunk)
                if is_first and console is not None:
                    _say(console, f"{request.number}: first token after {request.ttft:.3f} s")
        request.end()
    except TridentClientError as error:
        request.end(str(error))
    if console is not None:
        _say(console, escape(f"{request.number}: {request.text} -> {request.answer}"))


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
