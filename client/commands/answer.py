"""Prints a streamed answer to the terminal, and measures it."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from client.gateway.tool_parsers import AnswerStream, ContentDelta, ReasoningDelta
from client.protocol import Chunk

# C0 and C1 control characters but newline and tab: what a model writes must not steer the terminal.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_Part = ContentDelta | ReasoningDelta


@dataclass
class Answer:
    """One streamed answer, printed while it comes.

    A terminal shows the reasoning too, dimmed; into a file goes the answer alone.

    Attributes:
        text: what has come so far, without the reasoning.
        reasoning: what has come of that.
        num_tokens: tokens in both.
    """

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _first: float | None = None

    def print(self, chunks: Iterable[Chunk], console: Console) -> None:
        """Print `chunks` until they end; a line break follows whatever happens."""
        try:
            for part in self._parts(chunks):
                if isinstance(part, ReasoningDelta):
                    if console.is_terminal:
                        text = Text(part.text.translate(_CONTROLS), "dim")
                        console.print(text, end="", soft_wrap=True)
                    self.reasoning += part.text
                    continue
                if self.reasoning and not self.text and console.is_terminal:
                    console.file.write("\n\n")
                shown = part.text.translate(_CONTROLS) if console.is_terminal else part.text
                console.file.write(shown)
                console.file.flush()
                self.text += part.text
        finally:
            console.file.write("\n")
            console.file.flush()

    def message(self) -> dict[str, Any]:
        """Return it as a message of the chat."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **reasoning}

    def _parts(self, chunks: Iterable[Chunk]) -> Iterator[_Part]:
        stream = AnswerStream()
        for chunk in chunks:
            if self._first is None:
                self._first = time.perf_counter()
            self.num_tokens += chunk.num_output_tokens
            if chunk.sections is None:
                yield ContentDelta(chunk.text)
                continue
            for part in stream.add(chunk.sections, chunk.finish_reason).parts:
                if isinstance(part, _Part):
                    yield part

    @property
    def figures(self) -> str:
        """Tokens, time to the first one, and tokens per second over the whole time."""
        if self._first is None:
            return "no tokens"
        ttft = self._first - self._started
        rate = self.num_tokens / (time.perf_counter() - self._started)
        tokens = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        return f"{tokens}, first after {ttft:.2f} s, {rate:.0f} tokens/s"
