"""GrammarCompiler: compiles grammars in threads, by tenant, and keeps the last ones."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from engine.errors import TridentError, UnsupportedError
from engine.fair_executor import FairExecutor
from engine.text.grammar.sandbox import Sandbox
from engine.text.grammar.spec import GrammarSpec, GrammarTextError
from engine.text.grammar.trial import described, limits_of
from engine.text.grammar.vocabulary import TextEnds, Vocabulary

_MAX_KEPT = 64
_NICENESS = 10  # of the threads, and of the processes that they start
# Of a JSON schema or a list of choices, which take 1 s of a processor for a million characters.
_MAX_SMALL_CHARACTERS = 2**14
_LARGE_COST = 2**18  # at least, of what may take long whatever its size


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that has been asked for, and the tenants on whose behalf it waits."""

    future: Future[LLMatcher] = field(default_factory=Future)
    tenants: set[str] = field(default_factory=set)


class GrammarCompiler:
    """Compiles grammars one by one, tenants in turn, each first in the sandbox, then for use.

    Small ones are compiled beside one that may take long, in a second thread with a sandbox of its
    own. Neither threads nor processes are started before the first grammar, or the first that may
    take long.

    Attributes:
        text_ends: of the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Compile for `vocabulary`; this holds the interpreter for up to a second."""
        self._tokenizer: LLTokenizer | UnsupportedError
        try:
            self._tokenizer = vocabulary.ll_tokenizer()
        except UnsupportedError as error:  # of the requests, not of the engine
            self._tokenizer = error
        self.text_ends: TextEnds | None = None
        if isinstance(self._tokenizer, LLTokenizer):
            self.text_ends = vocabulary.text_ends(self._tokenizer)
        self._vocabulary = vocabulary
        self._sandboxes: dict[int, Sandbox] = {}  # by thread
        self._executor = FairExecutor(
            "grammar", max_small_cost=_MAX_SMALL_CHARACTERS, initializer=self._begin
        )
        self._lock = threading.Lock()  # of the compilations that begin
        self._kept: OrderedDict[tuple[str | bool | None, ...], _Compilation] = OrderedDict()

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[LLMatcher]:
        """Return the matcher at its start, to be copied for each sequence; equal specs share it.

        The future raises `GrammarTextError` if the grammar cannot be used, `UnsupportedError` if
        none can with this tokenizer, and another error if it could not be tried: the next request
        tries it again. What waits on behalf of several tenants has the turn of the first.
        """
        kept = self._kept.get(spec.key)
        if kept is None or not _may_be_kept(kept.future):
            kept = self._kept[spec.key] = _Compilation()
        self._kept.move_to_end(spec.key)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        future = kept.future
        if tenant not in kept.tenants and not (future.running() or future.done()):
            kept.tenants.add(tenant)
            self._executor.submit(
                partial(self._run, spec, future), cost=cost_of(spec), tenant=tenant
            )
        return future

    def close(self) -> None:
        """End the threads and the child processes."""
        for kept in self._kept.values():
            kept.future.cancel()
        self._executor.close()
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def _run(self, spec: GrammarSpec, future: Future[LLMatcher]) -> None:
        """Compile `spec`, unless that has been done in the turn of another tenant."""
        with self._lock:
            if future.running() or future.done() or not future.set_running_or_notify_cancel():
                return
        try:
            matcher = self._compile(spec)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(matcher)

    def _begin(self) -> None:
        """Begin a thread: with a lower priority, and a sandbox that is ready for its first task."""
        # Not that of the thread which starts this one.
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, 19))
        sandbox = self._sandboxes[threading.get_ident()] = Sandbox(self._vocabulary)
        if not isinstance(self._tokenizer, UnsupportedError):
            with contextlib.suppress(TridentError):  # the first task tries again, and reports it
                sandbox.start()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        if isinstance(self._tokenizer, UnsupportedError):
            raise self._tokenizer
        text = self._sandboxes[threading.get_ident()].text_of(spec)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits_of(spec))
        matcher.compute_bitmask()  # the first one of a lexer takes longest
        if matcher.is_error():
            raise GrammarTextError(described(matcher.get_error()))
        return matcher


def cost_of(spec: GrammarSpec) -> int:
    """Return how much of its tenant's turn a grammar takes, in characters of a plain JSON schema.

    Regular expressions, patterns in a schema too, and grammars may take all the time that there is
    for a trial, however short they are.
    """
    size = len(spec.text)
    is_plain = spec.kind in ("json_schema", "choice") and '"pattern' not in spec.text
    if is_plain and size <= _MAX_SMALL_CHARACTERS:
        return max(1, size)
    return size if is_plain else size + _LARGE_COST


def _may_be_kept(future: Future[LLMatcher]) -> bool:
    """Whether another compilation would end as this one does, or will."""
    if future.cancelled():
        return False
    error = future.exception() if future.done() else None
    return error is None or isinstance(error, GrammarTextError | UnsupportedError)
