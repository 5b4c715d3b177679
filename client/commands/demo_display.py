"""The display of `trident demo`: a frame while answers stream, then answers and figures."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from client.protocol import Chunk

_WIDE = 150  # columns of a terminal that has room for four panels side by side


@dataclass
class DemoRequest:
    """One request of the demo and the state of its answer.

    Attributes:
        number: from 1.
        text: the prompt.
        answer: the answer so far.
        num_tokens: tokens in it.
        problem: why it failed; empty if it did not.
    """

    number: int
    text: str
    answer: str = ""
    num_tokens: int = 0
    problem: str = ""
    _started: float | None = None
    _first: float | None = None
    _ended: float | None = None

    def start(self) -> None:
        """Note that the request is sent now."""
        self._started = time.perf_counter()

    def add(self, chunk: Chunk) -> bool:
        """Take a piece of the answer; return whether it is the first."""
        is_first = self._first is None
        if is_first:
            self._first = time.perf_counter()
        self.answer += chunk.text
        self.num_tokens += chunk.num_output_tokens
        return is_first

    def end(self, problem: str = "") -> None:
        """Note that nothing more comes, and why if that is an error."""
        self._ended = time.perf_counter()
        self.problem = problem or ("" if self.answer.strip() else "the answer is empty")

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended is not None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first piece, None before it."""
        if self._first is None or self._started is None:
            return None
        return self._first - self._started

    @property
    def span(self) -> tuple[float, float]:
        """When it was sent and when it ended, or now."""
        now = time.perf_counter()
        return self._started or now, self._ended or now

    @property
    def rate(self) -> float:
        """Tokens per second from sending to the end, or to now."""
        sent, ended = self.span
        return self.num_tokens / (ended - sent) if ended > sent else 0.0


def frame(requests: Sequence[DemoRequest], size: ConsoleDimensions) -> RenderableType:
    """Return one picture of the answers as far as they are, that fits into the terminal."""
    rows = -(-len(requests) // _num_columns(size.width))
    num_lines = max(2, min(4, (size.height - 3) // rows - 2))
    done = sum(each.ended for each in requests)
    tokens = sum(each.num_tokens for each in requests)
    status = f"{done} of {len(requests)} answered, {tokens} tokens, {_total_rate(requests):.0f}/s"
    return Group(_grid(requests, size.width, num_lines), Text(f" {status}", style="dim"))


def answers(requests: Sequence[DemoRequest], width: int) -> RenderableType:
    """Return all answers in full."""
    return _grid(requests, width, None)


def figures(requests: Sequence[DemoRequest], width: int) -> Table:
    """Return the table of times and rates, per request and in total, `width` columns at most."""
    first, last = _total_span(requests)
    slowest = max((each.ttft for each in requests if each.ttft is not None), default=0.0)
    totals = {
        "first token": f"<= {slowest:.3f} s",
        "tokens": str(sum(each.num_tokens for each in requests)),
        "time": f"{last - first:.2f} s",
        "tokens/s": f"{_total_rate(requests):.1f}",
    }
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, padding=(0, 1), pad_edge=False)
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("question", "all at once", no_wrap=True, overflow="crop", max_width=width - 52)
    for name, total in totals.items():
        table.add_column(name, total, justify="right", no_wrap=True)
    for each in requests:
        sent, ended = each.span
        table.add_row(
            str(each.number),
            Text(each.text),
            "-" if each.ttft is None else f"{each.ttft:.3f} s",
            str(each.num_tokens),
            f"{ended - sent:.2f} s",
            f"{each.rate:.1f}",
            style="red" if each.problem else None,
        )
    return table


def _total_span(requests: Sequence[DemoRequest]) -> tuple[float, float]:
    spans = [each.span for each in requests]
    return min(sent for sent, _ in spans), max(ended for _, ended in spans)


def _total_rate(requests: Sequence[DemoRequest]) -> float:
    first, last = _total_span(requests)
    return sum(each.num_tokens for each in requests) / (last - first) if last > first else 0.0


def _num_columns(width: int) -> int:
    return 4 if width >= _WIDE else 2


def _grid(requests: Sequence[DemoRequest], width: int, num_lines: int | None) -> Table:
    """Return panels side by side with the last `num_lines` of each answer, or with all of it."""
    columns = _num_columns(width)
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for start in range(0, len(requests), columns):
        row = requests[start : start + columns]
        texts = [_lines(each, width // columns - 4) for each in row]
        height = num_lines or max(len(lines) for lines in texts)
        grid.add_row(
            *(_panel(each, lines[-height:], height) for each, lines in zip(row, texts, strict=True))
        )
    return grid


def _lines(request: DemoRequest, width: int) -> list[Text]:
    """Return the answer, or its error, in lines of `width` cells."""
    if request.problem:
        text = Text(request.problem, style="red")
    else:
        text = Text(request.answer.strip() or "...")
    return list(text.wrap(Console(width=width), width))


def _panel(request: DemoRequest, lines: Sequence[Text], height: int) -> Panel:
    style = "red" if request.problem else "green" if request.ended else "yellow"
    return Panel(
        Text("\n").join(lines),
        title=Text(request.text, style="bold", overflow="crop"),
        title_align="left",
        subtitle=Text(_subtitle(request), style="dim"),
        subtitle_align="right",
        border_style=style,
        height=height + 2,
    )


def _subtitle(request: DemoRequest) -> str:
    if request.ttft is None:
        return "waiting"
    return f"first {request.ttft:.2f} s, {request.num_tokens} tokens, {request.rate:.0f}/s"
