"""`trident run`: one prompt, one answer; a filter for pipes."""

import contextlib
import sys
from typing import Annotated

import typer
from rich.console import Console

from client.client_protocol import ClientProtocol
from client.commands.answer import Answer
from client.commands.connection_options import connect, with_options
from client.commands.sampling_options import (
    MaxTokens,
    Seed,
    Stop,
    System,
    Temperature,
    sampling_options,
)
from client.commands.standard_input import require_standard_input
from client.errors import InvalidRequestError
from client.protocol import Message

_HEALTH_TIMEOUT_S = 5.0

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_options(connect)
def command(
    client: ClientProtocol,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The question, or with --raw the text to continue; - or no argument reads "
            "standard input."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Whether to apply the model's chat template.")
    ] = True,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Time limit of the whole answer, in seconds; default: none."),
    ] = None,
) -> None:
    """Print the model's answer to a prompt as it is generated."""
    if system and not chat:
        raise typer.BadParameter("--system: needs the chat template; leave out --raw")
    text = _prompt(prompt)
    # A request would be tried again while the server is away; this reports at once what is wrong.
    client.health(_HEALTH_TIMEOUT_S if timeout is None else min(timeout, _HEALTH_TIMEOUT_S))
    options = sampling_options(max_tokens, temperature, seed, stop)
    options["timeout"] = timeout
    if chat:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        options["messages"], options["return_sections"] = messages, True
        chunks = client.stream(**options)
    else:
        chunks = client.stream(text, **options)
    with contextlib.closing(chunks):
        Answer().print(chunks, Console())


def _prompt(given: str | None) -> str:
    """Return the prompt: the argument, or standard input without its last line break.

    Raises:
        InvalidRequestError: standard input is closed, empty or not UTF-8.
    """
    if given not in (None, "-"):
        return given
    require_standard_input()
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("PROMPT: is missing; give one, or pipe text into the command")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"is not UTF-8: {error.reason}", param="standard input") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidRequestError("is empty", param="standard input")
    return text
