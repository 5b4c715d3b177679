"""Shows the progress of a starting server; turns signals into KeyboardInterrupt."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from engine.launch import server_log
from engine.launch.gpu import has_gpu


class ServerLog:
    """Shows what matters of a server's log to its user, or every line of it.

    Args:
        everything: print each line as it is, but without a GPU none that complains of that.

    Attributes:
        description: the model and its KV cache in one line, as the engine reports when ready.
        is_loaded: whether `loading` has ended without an error.
    """

    def __init__(self, console: Console, *, everything: bool = False) -> None:
        self.description = ""
        self.is_loaded = False
        self._console = console
        self._everything = everything
        self._on_words: Callable[[str], None] = lambda words: None

    def show(self, line: str) -> None:
        """Take one raw line of the log."""
        parsed = server_log.parse(line)
        if self._everything and (has_gpu() or not parsed.is_harmless):
            self._console.out(line, highlight=False)
        if parsed.from_engine:
            if "KV cache for" in parsed.text:
                self.description = parsed.text
                if self.is_loaded and not self._everything:
                    self._console.print("[green]The engine is ready again.[/]")
            self._on_words(parsed.text)
        if self.is_loaded and parsed.is_problem and not self._everything:
            self._console.print(f"[yellow]{escape(parsed.text)}[/]")

    @contextmanager
    def loading(self, title: str) -> Iterator[None]:
        """Show in the block that the server is loading, for how long, and its log lines."""
        if not self._console.is_terminal:
            self._console.print(title, highlight=False)
            yield
        else:
            texts = [
                TextColumn(text, table_column=Column(no_wrap=True, overflow="crop"))
                for text in ("[bold]{task.description}", "[dim]{task.fields[words]}")
            ]
            columns = (SpinnerColumn("line"), *texts, TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                task: TaskID = progress.add_task(escape(title), total=None, words="")
                self._on_words = lambda words: progress.update(task, words=escape(words))
                yield
        self.is_loaded = True


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP in the block raise KeyboardInterrupt, as SIGINT does.

    A signal that this program was started to ignore stays ignored: SIGHUP under nohup, SIGINT (by
    Python itself) in a background job of a script.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    handled = [
        each
        for each in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = {each: signal.signal(each, interrupt) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
