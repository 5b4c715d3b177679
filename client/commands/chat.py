"""`trident generate` and `trident chat`: text from a running server as it comes."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from client.client import TridentClient
from client.errors import TridentClientError
from client.protocol import Chunk, Message, SamplingOptions

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_HELP = "Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D ends."


@dataclass
class Answer:
    """One streamed answer, printed while it comes.

    Attributes:
        text: what has come so far.
        num_tokens: tokens in it.
    """

    text: str = ""
    num_tokens: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _first: float | None = None

    def print(self, chunks: Iterable[Chunk], console: Console) -> None:
        """Print `chunks` until they end; a line break follows whatever happens."""
        try:
            for chunk in chunks:
                if self._first is None:
                    self._first = time.perf_counter()
                # What a model writes must not steer the terminal; a file gets it as it is.
                shown = chunk.text.translate(_CONTROLS) if console.is_terminal else chunk.text
                console.file.write(shown)
                console.file.flush()
                self.text += chunk.text
                self.num_tokens += chunk.num_output_tokens
        finally:
            console.file.write("\n")
            console.file.flush()

    @property
    def figures(self) -> str:
        """Tokens, time to the first one, and tokens per second over the whole time."""
        if self._first is None:
            return "no tokens"
        ttft = self._first - self._started
        rate = self.num_tokens / (time.perf_counter() - self._started)
        tokens = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        return f"{tokens}, first after {ttft:.2f} s, {rate:.0f} tokens/s"


def generate(chunks: Generator[Chunk, None, None], console: Console) -> None:
    """Print one answer to `console`.

    Raises:
        TridentClientError: the request failed.
    """
    with contextlib.closing(chunks):
        Answer().print(chunks, console)


class Chat:
    """A conversation in the terminal; it ends at `/exit` or the end of the input.

    Args:
        system: a system message, or empty for none.
        read: asks the user for a line.
    """

    def __init__(
        self,
        client: TridentClient,
        console: Console,
        *,
        system: str = "",
        sampling: SamplingOptions,
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
        """Return the next line, empty if it was abandoned by Ctrl-C, None at the end."""
        try:
            return self._read("> ").strip()
        except KeyboardInterrupt:
            self._console.print()
            self._note(_HELP)
            return ""
        except EOFError:
            self._console.print()
            return None

    def _answer(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        answer = Answer()
        chunks = self._client.stream(messages=messages, **self._sampling)
        try:
            with contextlib.closing(chunks):
                answer.print(chunks, self._console)
        except KeyboardInterrupt:
            self._note(f"stopped; {answer.figures}")
        except TridentClientError as error:
            self._console.print(f"[red]{escape(str(error))}[/]", highlight=False)
            return  # the question did not happen
        else:
            self._note(answer.figures)
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]", highlight=False)
