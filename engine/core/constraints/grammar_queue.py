"""GrammarQueue: requests that wait until their grammar is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from llguidance import LLMatcher

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.matcher import SequenceGrammar
from engine.text.grammar.spec import GrammarSpec, GrammarTextError


class GrammarQueue:
    """Holds requests in the scheduler, so that they delay no other, and lets them run in time."""

    def __init__(self, scheduler: Scheduler, compiler: GrammarCompiler, num_ids: int) -> None:
        """Compile with `compiler`, whose `Vocabulary` has `num_ids`."""
        self._scheduler = scheduler
        self._compiler = compiler
        self._num_ids = num_ids
        self._waiting: dict[int, tuple[GrammarSpec, Future[LLMatcher]]] = {}  # by uid

    def add(self, siblings: Sequence[Request], spec: GrammarSpec) -> None:
        """Hold the sequences of a new request until `spec` is compiled."""
        self._scheduler.add(siblings, hold=True)
        self._waiting[siblings[0].uid] = spec, self._compiler.compile(spec)

    def wait(self, timeout_s: float) -> None:
        """Wait until a grammar is compiled, if any is not, for `timeout_s` seconds at most."""
        if self._waiting:
            futures = [future for _, future in self._waiting.values()]
            wait(futures, timeout_s, return_when=FIRST_COMPLETED)

    def release(self) -> Iterator[tuple[int, Exception]]:
        """Let the requests run whose grammar is compiled.

        Yields the uids of those that must be failed because it cannot be, and why. Compilations
        that no request waits for any more are cancelled.
        """
        for uid, (spec, future) in list(self._waiting.items()):
            if (uid, 0) not in self._scheduler.waiting.held:  # it was aborted
                del self._waiting[uid]
                if not any(future is other for _, other in self._waiting.values()):
                    future.cancel()
            elif future.done():
                del self._waiting[uid]
                try:
                    self._start(uid, future.result())
                except GrammarTextError as error:
                    yield uid, spec.error(str(error))
                except Exception as error:  # the step must go on for the others
                    yield uid, error

    def _start(self, uid: int, start: LLMatcher) -> None:
        for request in self._scheduler.unfinished[uid].values():
            request.grammar = SequenceGrammar(start, self._num_ids)
        self._scheduler.waiting.release(uid)
