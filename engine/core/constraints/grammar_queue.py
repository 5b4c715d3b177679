"""GrammarQueue: requests that wait until their grammar is compiled."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from llguidance import LLMatcher

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import QueueFullError
from engine.text.grammar.compiler import GrammarCompiler, cost_of
from engine.text.grammar.host_budget import HostBudget
from engine.text.grammar.matcher import SequenceGrammar
from engine.text.grammar.spec import GrammarSpec, GrammarTextError

_MAX_COST = 2**24  # of a tenant's different grammars: 16 million characters, or 64 that may be slow

K = TypeVar("K")

_Key = tuple[str | bool | None, ...]  # of a grammar


class _Wait(NamedTuple):
    """What a request waits for, and on whose behalf."""

    spec: GrammarSpec
    tenant: str
    future: Future[LLMatcher]


class GrammarQueue:
    """Holds requests in the scheduler, so that they delay no other, and lets them run in time.

    Tenants are served in turn, and what each may have wait is bounded. A step costs the same
    however many wait.
    """

    def __init__(self, scheduler: Scheduler, compiler: GrammarCompiler, num_ids: int) -> None:
        """Compile with `compiler`, whose `Vocabulary` has `num_ids`."""
        self._scheduler = scheduler
        self._compiler = compiler
        self._num_ids = num_ids
        self._waiting: dict[int, _Wait] = {}  # by uid
        self._num_waiting: Counter[_Key] = Counter()  # requests, by grammar
        self._num_of_tenant: Counter[tuple[str, _Key]] = Counter()  # likewise
        self._costs: Counter[str] = Counter()  # of each tenant's different grammars
        # By the compiler's threads: uids of requests whose grammar is compiled.
        self._done: deque[int] = deque()
        self._any_done = threading.Event()
        # Of all sequences of a compiled grammar.
        self._budgets: WeakKeyDictionary[Future[LLMatcher], HostBudget] = WeakKeyDictionary()

    def add(self, siblings: Sequence[Request], spec: GrammarSpec) -> None:
        """Hold the sequences of a new request until `spec` is compiled.

        Raises:
            QueueFullError: too much of the request's tenant waits already.
        """
        uid, tenant = siblings[0].uid, siblings[0].tenant
        future = self._compiler.compile(spec, tenant) if self._has_room(spec, tenant) else None
        if future is None:
            raise QueueFullError(
                f"Maximum queue size of {_MAX_COST} characters of grammars reached ({spec.field}: "
                "waiting to be compiled); try again later"
            )
        self._scheduler.add(siblings, hold=True)
        self._waiting[uid] = _Wait(spec, tenant, future)
        self._num_waiting[spec.key] += 1
        if not self._num_of_tenant[tenant, spec.key]:
            self._costs[tenant] += cost_of(spec)
        self._num_of_tenant[tenant, spec.key] += 1
        future.add_done_callback(lambda _: self._note_done(uid))

    def discard(self, uid: int) -> None:
        """Wait for the grammar of a request no longer, if it is not compiled.

        A compilation that no other request waits for is cancelled.
        """
        wait = self._remove(uid)
        if wait is not None and not self._num_waiting[wait.spec.key]:
            wait.future.cancel()

    def wait(self, timeout_s: float) -> None:
        """Wait until a grammar is compiled, if any is not, for `timeout_s` seconds at most."""
        if self._waiting:
            self._any_done.wait(timeout_s)

    def release(self) -> Iterator[tuple[int, Exception]]:
        """Let the requests run whose grammar is compiled.

        Yields the uids of those that must be failed because it cannot be, and why.
        """
        self._any_done.clear()
        while self._done:
            uid = self._done.popleft()
            wait = self._remove(uid)
            if wait is None:  # it was aborted
                continue
            try:
                self._start(uid, wait.spec, wait.future)
            except GrammarTextError as error:
                yield uid, wait.spec.error(str(error))
            except Exception as error:  # the step must go on for the others
                yield uid, error

    def _has_room(self, spec: GrammarSpec, tenant: str) -> bool:
        """Whether `spec` may wait; always if it waits already, or nothing of the tenant does."""
        if self._num_of_tenant[tenant, spec.key] or not self._costs[tenant]:
            return True
        return self._costs[tenant] + cost_of(spec) <= _MAX_COST

    def _note_done(self, uid: int) -> None:
        """Have `release` look at a request; in a thread of the compiler."""
        self._done.append(uid)
        self._any_done.set()

    def _remove(self, uid: int) -> _Wait | None:
        wait = self._waiting.pop(uid, None)
        if wait is not None:
            key = wait.spec.key
            _decrease(self._num_waiting, key, 1)
            _decrease(self._num_of_tenant, (wait.tenant, key), 1)
            if (wait.tenant, key) not in self._num_of_tenant:
                _decrease(self._costs, wait.tenant, cost_of(wait.spec))
        return wait

    def _start(self, uid: int, spec: GrammarSpec, compiled: Future[LLMatcher]) -> None:
        start, shared = compiled.result(), self._budgets.setdefault(compiled, HostBudget())
        for request in self._scheduler.unfinished[uid].values():
            request.grammar = SequenceGrammar(
                start,
                self._num_ids,
                budget=HostBudget(spec.kind),
                shared=shared,
                text_ends=self._compiler.text_ends,
            )
        self._scheduler.waiting.release(uid)


def _decrease(counter: Counter[K], key: K, count: int) -> None:
    """Take `count` from a counter, which forgets what has none."""
    counter[key] -= count
    if not counter[key]:
        del counter[key]
