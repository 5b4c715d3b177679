"""`trident chat`: a conversation in the terminal."""

import contextlib
from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape

from client.client_protocol import ClientProtocol, CommonRequestOptions
from client.commands.answer import Answer
from client.commands.connection_options import connect, with_options
from client.commands.sampling_options import MaxTokens, System, Temperature, sampling_options
from client.commands.standard_input import require_standard_input
from client.errors import TridentClientError
from client.protocol import Message

_HELP = "Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D ends."

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_options(connect)
def command(
    client: ClientProtocol,
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Chat with the model: Ctrl-C stops an answer, Ctrl-D ends the chat."""
    import readline  # noqa: F401 (gives input() editing and history)

    require_standard_input()
    client.health()
    sampling = sampling_options(max_tokens, temperature)
    Chat(client, Console(), system=system, sampling=sampling).run()


class Chat:
    """A conversation in the terminal; it ends at `/exit` or the end of the input.

    Args:
        system: a system message, or empty for none.
        read: asks the user for a line.
    """

    def __init__(
        self,
        client: ClientProtocol,
        console: Console,
        *,
        system: str = "",
        sampling: CommonRequestOptions,
        read: Callable[[str], str] = input,
    ) -> None:
        self._client = client
        self._console = console
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._sampling = sampling
        self._read = read

    def run(self) -> None:
        """Talk until the user ends it. Errors of single requests are shown, not raised."""
        self._note(_HELP)
        while (line := self._ask()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._start)
            elif line.startswith("/"):
                self._note(_HELP)
            elif line:
                self._answer(line)

    def _ask(self) -> str | None:
        """Return the next line, empty if it is none or was abandoned by Ctrl-C, None at the end."""
        try:
            return self._read("> ").strip()
        except UnicodeDecodeError as error:
            self._error(f"the line is not UTF-8: {error.reason}")
            return ""
        except KeyboardInterrupt:
            self._console.print()
            self._note(_HELP)
            return ""
        except EOFError:
            self._console.print()
            return None

    def _answer(self, prompt: str) -> None:
        messages = [*self._messages, {"role": "user", "content": prompt}]
        answer = Answer()
        asked: CommonRequestOptions = {
            **self._sampling,
            "messages": messages,
            "return_sections": True,
        }
        try:
            with contextlib.closing(self._client.stream(**asked)) as chunks:
                answer.print(chunks, self._console)
        except KeyboardInterrupt:
            self._note(f"stopped; {answer.figures}")
        except TridentClientError as error:
            self._error(str(error))
            return  # the turn did not happen
        else:
            self._note(answer.figures)
        if answer.text or answer.reasoning:
            self._messages = [*messages, answer.message()]

    def _error(self, text: str) -> None:
        self._console.print(f"[red]{escape(text)}[/]", highlight=False)

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]", highlight=False)
