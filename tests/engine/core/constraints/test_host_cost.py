"""What the host does for one token of one sequence costs little, for the worst that may be asked.

In CPU time, and with ample margins. Grammars, which may cost any time, have a `HostBudget`; stop
strings are in `tests/engine/text/test_text_work.py`, beams in `beams/test_beam_search.py`.
"""

import time
from collections.abc import Callable

import numpy as np

from engine.core.constraints.bad_words import BadWords
from engine.core.constraints.dry import Dry, DryArgs
from engine.logits_processors import ProcessorRow
from engine.validation.limits import MAX_DRY_TOKENS
from tests.factories.grammars import demo_tokenizer

_MOST_S = 0.005  # measured: 0.05 to 0.25 ms
_NUM_WORDS = 256


def _cost(work: Callable[[int], object], repeats: int = 31) -> float:
    costs = []
    for number in range(repeats):
        began = time.thread_time()
        work(number)
        costs.append(time.thread_time() - began)
    return float(np.median(costs))


def test_bad_words_that_begin_alike_cost_little() -> None:
    words = BadWords([[*range(30), 5, token_id] for token_id in range(_NUM_WORDS)])
    tokens = np.resize(np.arange(30, dtype=np.int32), 4096)
    tokens[-1] = 5
    assert _cost(lambda _: words.forbidden(tokens, 4)) < _MOST_S


def test_dry_of_one_token_over_and_over_costs_little() -> None:
    tokenizer = demo_tokenizer()
    dry, row = Dry(tokenizer.token_text), ProcessorRow(DryArgs(1.0, 1.75, 2, MAX_DRY_TOKENS, ()))
    tokens = np.full(MAX_DRY_TOKENS + 100, 50, dtype=np.int32)

    def adjust(number: int) -> None:
        row.token_ids = tokens[: MAX_DRY_TOKENS + number]
        dry.adjust([row])

    adjust(0)
    assert _cost(lambda number: adjust(number + 1)) < _MOST_S
