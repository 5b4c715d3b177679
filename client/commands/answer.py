"""Prints a streamed answer to the terminal, and measures it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console

from client.protocol import Chunk

# C0 and C1 control characters but newline and tab: what a model writes must not steer the terminal.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


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
