"""`trident health`: checks whether a server works."""

import time
from typing import Annotated

import typer

from client.client_protocol import ClientProtocol
from client.commands.connection_options import connect, with_options
from client.errors import QueueFullError, UnavailableError
from client.response import Collector

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_options(connect)
def command(
    client: ClientProtocol,
    generate: Annotated[
        bool, typer.Option("--generate", help="Also generate one token, to check all stages.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Time limit of the whole check, in seconds.")
    ] = 10,
) -> None:
    """Check the health of the server; exit status 1 if it is not healthy."""
    typer.echo(check(client, generate=generate, timeout=timeout))


def check(client: ClientProtocol, *, generate: bool, timeout: float) -> str:
    """Return one line on a server that is well.

    Args:
        generate: also generate a token, through all stages. A full queue is not an error.
        timeout: seconds for all of it.

    Raises:
        TridentClientError: it is not well, or cannot be asked.
    """
    deadline = time.monotonic() + timeout
    health = client.health(timeout)
    if not health.is_ready:
        raise UnavailableError(health.detail or f"the engine is {health.state}")
    line = f"healthy: {health.num_in_flight} requests in flight"
    if health.num_restarts:
        line += f", the engine process was restarted {health.num_restarts} times"
    if health.ranks:
        line += f", {len(health.ranks)} ranks (on {', '.join(health.ranks)})"
    return line + _generated(client, deadline) if generate else line


def _generated(client: ClientProtocol, deadline: float) -> str:
    started = time.monotonic()
    try:
        collector = Collector()
        for chunk in client.stream("Hello", max_tokens=1, timeout=deadline - started):
            collector.add(chunk)
        answer = collector.completion()
    except QueueFullError:
        return ", the queue is full"
    if not answer.num_output_tokens:
        raise UnavailableError(
            f"no token was generated: the request ended with {answer.finish_reason!r}"
        )
    return f", a token took {time.monotonic() - started:.2f} s"
