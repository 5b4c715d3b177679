"""GrammarCompiler: compiles grammars in a thread, and keeps the last ones."""

from __future__ import annotations

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from engine.errors import UnsupportedError
from engine.text.grammar.sandbox import Sandbox
from engine.text.grammar.spec import GrammarSpec, GrammarTextError
from engine.text.grammar.trial import LIMITS, described
from engine.text.grammar.vocabulary import Vocabulary

_MAX_KEPT = 64
_NICENESS = 10


class GrammarCompiler:
    """Compiles one grammar at a time, first in the sandbox, then for use.

    Neither thread nor process is started before the first grammar.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Compile for `vocabulary`; this holds the interpreter for up to a second."""
        self._tokenizer: LLTokenizer | UnsupportedError
        try:
            self._tokenizer = vocabulary.ll_tokenizer()
        except UnsupportedError as error:  # of the requests, not of the engine
            self._tokenizer = error
        self._sandbox = Sandbox(vocabulary)  # of the compiling thread
        self._executor = ThreadPoolExecutor(1, "grammar", initializer=_yield_to_others)
        self._kept: OrderedDict[tuple[str, str, bool, str, str, str], Future[LLMatcher]] = (
            OrderedDict()
        )

    def compile(self, spec: GrammarSpec) -> Future[LLMatcher]:
        """Return the matcher at its start, to be copied for each sequence; equal specs share it.

        The future raises `GrammarTextError` if the grammar cannot be used, `UnsupportedError` if
        none can with this tokenizer, and another error if it could not be tried: the next request
        tries it again.
        """
        future = self._kept.get(spec.key)
        if future is None or not _may_be_kept(future):
            future = self._kept[spec.key] = self._executor.submit(self._compile, spec)
        self._kept.move_to_end(spec.key)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return future

    def close(self) -> None:
        """End the thread and the child process."""
        self._executor.shutdown(cancel_futures=True)
        self._sandbox.close()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        if isinstance(self._tokenizer, UnsupportedError):
            raise self._tokenizer
        text = self._sandbox.text_of(spec)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # the first one of a lexer takes longest
        if matcher.is_error():
            raise GrammarTextError(described(matcher.get_error()))
        return matcher


def _may_be_kept(future: Future[LLMatcher]) -> bool:
    """Whether another compilation would end as this one does, or will."""
    if future.cancelled():
        return False
    error = future.exception() if future.done() else None
    return error is None or isinstance(error, GrammarTextError | UnsupportedError)


def _yield_to_others() -> None:
    """Lower the priority of this thread, and of the processes that it starts."""
    os.nice(_NICENESS)
