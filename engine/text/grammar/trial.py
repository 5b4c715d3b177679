"""Trial compilation of a grammar in a child process: the child's side.

Some grammars take minutes or gigabytes to compile, or overflow the stack. Here that ends this
process alone.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

import numpy as np
import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.text.grammar.compose import llguidance_texts
from engine.text.grammar.host_budget import HostBudget
from engine.text.grammar.spec import MAX_FORCED_BYTES, GrammarSpec, GrammarTextError
from engine.text.grammar.vocabulary import Vocabulary

# Wide objects have some thousand items.
_MAX_ITEMS = 20_000

_MAX_MEMORY = 2**30  # bytes, beside those of the vocabulary
_STACK = 2**21  # bytes: no more than any thread that uses the compiled grammar has
_NUM_STEPS = 200
_MAX_WALK_S = 1.0  # CPU seconds
_PR_SET_PDEATHSIG = 1
_EXCERPT = re.compile(r"\s*(\d+ \|.*|\^+)?\s*")


def main() -> NoReturn:
    """Answer each line of stdin, a `GrammarSpec`, by a line; the first one is the `Vocabulary`."""
    # Also if the parent dies while a grammar keeps this process busy.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    vocabulary = Vocabulary(**json.loads(sys.stdin.buffer.readline()))
    tokenizer = vocabulary.ll_tokenizer()
    special = vocabulary.special_tokens(tokenizer)
    memory = psutil.Process().memory_info().vms + _MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        thread = threading.Thread(target=_answer, args=(line, vocabulary, tokenizer, special))
        thread.start()
        thread.join()
    sys.exit()


def _answer(
    line: bytes, vocabulary: Vocabulary, tokenizer: LLTokenizer, special: dict[str, int]
) -> None:
    try:
        spec = GrammarSpec.model_validate_json(line)
        reply = {}
        # The steps of a trial may not reach what begins later.
        for each in (spec.body, spec) if spec.begin_after else (spec,):
            texts = llguidance_texts(each, special, vocabulary.eos_token_ids)
            reply = {"text": _usable(texts, spec, vocabulary, tokenizer)}
    except GrammarTextError as error:
        reply = {"error": str(error)}
    except (MemoryError, RecursionError):
        reply = {"error": "is too complex"}
    except Exception as error:  # without an answer the parent would wait in vain
        reply = {"error": f"cannot be compiled: {error}"}
    print(json.dumps(reply), flush=True)


def limits_of(spec: GrammarSpec) -> LLParserLimits:
    """Return the limits of llguidance for `spec`: its own for rules that a client has written."""
    if spec.kind == "grammar":
        return LLParserLimits(verbose_errors=False)
    return LLParserLimits(max_items_in_row=_MAX_ITEMS, verbose_errors=False)


def _usable(
    texts: Iterable[str], spec: GrammarSpec, vocabulary: Vocabulary, tokenizer: LLTokenizer
) -> str:
    """Return the first of `texts` that can be followed; raises as `_walk` for the last."""
    refusal = GrammarTextError("is missing")
    for text in texts:
        try:
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits_of(spec))
            _walk(matcher, vocabulary, HostBudget(spec.kind))
        except GrammarTextError as error:
            refusal = error
        else:
            return text
    raise refusal


def _walk(matcher: LLMatcher, vocabulary: Vocabulary, budget: HostBudget) -> None:
    """Take some steps that the grammar allows, so that one that cannot be followed is refused.

    Raises:
        GrammarTextError: it is wrong, or needs too much to be followed.
    """
    draw, began = random.Random(0), time.thread_time()
    spent_s = 0.0
    for step in range(_NUM_STEPS):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise GrammarTextError(described(matcher.get_error()))
        forced_tokens(matcher)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if step == 0 and not len(allowed):
            raise GrammarTextError("no text of the model's tokens can match")
        going_on = allowed[~np.isin(allowed, vocabulary.eos_token_ids)]
        if not len(going_on) or not matcher.consume_token(int(draw.choice(going_on))):
            break
        step_s = time.thread_time() - began - spent_s
        spent_s += step_s
        if step:  # the first mask of a lexer takes longest
            budget.spend(step_s)
            budget.check(step_s)
        if spent_s > _MAX_WALK_S:
            break
    if matcher.is_error():
        raise GrammarTextError(described(matcher.get_error()))


def forced_tokens(matcher: LLMatcher) -> list[int]:
    """Return the only tokens that can follow, as many as are known; they are not taken yet.

    Raises:
        GrammarTextError: they are too many.
    """
    size = len(matcher.compute_ff_bytes())  # in a tenth of the time that their tokens take
    if size > MAX_FORCED_BYTES:
        raise GrammarTextError(
            f"leaves no choice about {size} bytes in a row; at most {MAX_FORCED_BYTES} are allowed"
        )
    return matcher.compute_ff_tokens()


def described(error: str) -> str:
    """Return an error of llguidance for clients: one line, without traces and excerpts."""
    lines = error.split("\n<")[0].splitlines()
    text = " ".join(line.strip() for line in lines if not _EXCERPT.fullmatch(line))
    if text.startswith("panic"):
        return "is too complex"
    return "nothing can match" if text.startswith("NoExtension") else text


if __name__ == "__main__":
    main()
