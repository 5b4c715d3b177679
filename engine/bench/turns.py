"""`python -m engine.bench.turns`: what turns of conversations compute again, with what is cached.

Several conversations with one system prompt take turns together. Each turn has what was said
before, and new tokens behind it; of an answer a part may be left out, as templates leave out
reasoning. Of a model whose layers keep states, a turn can begin where there is KV and a state.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.state_manager import StatePool
from engine.core.request import Request

_SYSTEM_TOKENS = (700, 1100)
_NEW_TOKENS = (40, 200)
_ANSWER_TOKENS = (60, 200)


class LeastRecentlyUsed(StatePool):
    """Evicts the checkpoint that was used longest ago, whatever it saves; for comparison."""

    def _take_cached(self) -> int:
        return BlockPool._take_cached(self)


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one turn, of all conversations.

    Attributes:
        num_prompt: of the prompts.
        num_known: of these, what the turn before had or answered; at first the system prompt, of
            all conversations but one.
        num_kv: of these, those whose KV was found.
        num_hits: of these, those that were not computed again.
    """

    num_prompt: int
    num_known: int
    num_kv: int
    num_hits: int

    @property
    def num_recomputed(self) -> int:
        """Tokens that were computed before, and are again."""
        return self.num_known - self.num_hits


def run_turns(
    settings: dict[str, Any],
    *,
    conversations: int,
    turns: int,
    strips_answers: bool,
    pool: StatePool | None = None,
) -> list[Turn]:
    """Return the figures of each turn.

    Args:
        settings: of the engine.
        strips_answers: a turn has only the second half of each answer before it.
        pool: takes the place of the model's own.
    """
    steps, draw = Steps(settings), random.Random(0)
    scheduler, vocab = steps.core.scheduler, range(steps.core.ready.vocab_size)
    if pool is not None and scheduler.kv_cache.states is not None:
        scheduler.kv_cache.states.pool = pool
    system = draw.choices(vocab, k=draw.randint(*_SYSTEM_TOKENS))
    said = [list(system) for _ in range(conversations)]
    found = []
    for number in range(turns):
        num_known = sum(map(len, said)) if number else (conversations - 1) * len(system)
        hits, lost = scheduler.num_prefix_hits, scheduler.num_prefix_lost
        for tokens in said:
            tokens += draw.choices(vocab, k=draw.randint(*_NEW_TOKENS))
            steps.add([tokens], max_tokens=draw.randint(*_ANSWER_TOKENS))
        asked = [next(iter(each.values())) for each in scheduler.unfinished.values()]
        _finish(steps)
        hits = scheduler.num_prefix_hits - hits
        lost = scheduler.num_prefix_lost - lost
        found.append(Turn(sum(map(len, said)), num_known, hits + lost, hits))
        for tokens, request in zip(said, asked, strict=True):
            tokens += _kept(request, strips_answers)
    steps.clear()
    return found


def _finish(steps: Steps) -> None:
    while steps.core.has_unfinished_requests():
        steps.core.step()


def _kept(request: Request, strips_answers: bool) -> list[int]:
    """Return what the next turn has of an answer: all, or its last tokens."""
    answer: list[int] = request.token_ids[request.num_prompt_tokens :].tolist()
    return answer[len(answer) // 2 :] if strips_answers else answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the turns, and what is found in smaller pools of checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.turns", description=__doc__)
    parser.add_argument("model", help="folder, hub id or GGUF file")
    parser.add_argument("--turns", type=int, default=6, help="default: 6")
    parser.add_argument("--conversations", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--checkpoints",
        type=int,
        help="checkpoints of states that there is room for (default: a share of the memory)",
    )
    parser.add_argument(
        "--strip-answers",
        action="store_true",
        help="leave the first half of each answer out of the next turn, as templates leave out "
        "reasoning",
    )
    parser.add_argument(
        "--device",
        choices=("null", "cpu"),
        default="null",
        help="null computes nothing, and makes tokens up (default: null)",
    )
    options = parser.parse_args(arguments)
    settings = {
        "model": options.model,
        "device": "null:0" if options.device == "null" else options.device,
        "max_num_seqs": options.conversations,
    }
    pools: dict[str, StatePool | None] = {"": None}
    if options.checkpoints is not None:
        # The null block, those of running sequences, and one that a sequence begins with.
        size = options.checkpoints + options.conversations + 2
        pools = {"GreedyDual": StatePool(size), "LRU": LeastRecentlyUsed(size)}
    rows = []
    for name, pool in pools.items():
        measured = run_turns(
            settings,
            conversations=options.conversations,
            turns=options.turns,
            strips_answers=options.strip_answers,
            pool=pool,
        )
        for number, turn in enumerate(measured, 1):
            share = turn.num_hits / turn.num_kv if turn.num_kv else 1.0
            each = (turn.num_prompt, turn.num_known, turn.num_kv, turn.num_hits)
            per_turn = turn.num_recomputed / options.conversations
            cells = [f"{count:,}" for count in (*each, turn.num_recomputed)]
            rows.append(
                [f"{name} turn {number}".strip(), *cells, f"{per_turn:.0f}", f"{share:.0%}"]
            )
    header = [
        "",
        "prompt",
        "known",
        "KV found",
        "hits",
        "recomputed",
        "per turn",
        "hits / KV found",
    ]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
