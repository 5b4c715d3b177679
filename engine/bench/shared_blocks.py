"""`python -m engine.bench.shared_blocks`: the KV memory that sequences of one request share.

The samples (`n`) and the beams (`beam_width`) of a request share the blocks of what they have in
common, and copy a block when they first write into it differently. Each case is run on the bundled
model, and again as so many requests of one sequence that share nothing; the table has the most
blocks that were in use at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.demo.stories import story
from engine.protocol import AddRequest
from engine.token_ids import pack_token_ids

_BLOCK_SIZE = 16
_KINDS = ("n", "beam_width")


@dataclass(frozen=True)
class Case:
    """A request of `count` sequences, after a prompt of `num_prompt_tokens`."""

    kind: str
    count: int
    num_prompt_tokens: int


class SharedBlocks:
    """An engine with the bundled model, whose blocks are counted after each step."""

    def __init__(self, max_tokens: int, max_num_seqs: int) -> None:
        """Run requests of `max_tokens` output tokens, `max_num_seqs` sequences at once."""
        self._max_tokens = max_tokens
        self._uid = 0
        settings: dict[str, Any] = {"max_num_seqs": max_num_seqs, "block_size": _BLOCK_SIZE}
        self._core = EngineCore(EngineConfig.parse({"model": "demo", "device": "cpu", **settings}))
        draw = Random(0)
        text = " ".join(story(draw).answer for _ in range(200))
        self._text = self._core.tokenizer.encode(text)

    def most_blocks(self, case: Case, *, shared: bool) -> int:
        """Return the most blocks in use at once: of one request, or of as many as sequences."""
        params: dict[str, Any] = {"max_tokens": self._max_tokens, "ignore_eos": True, "seed": 0}
        if shared:
            self._add(case, {**params, case.kind: case.count}, "")
        else:
            for place in range(case.count):
                self._add(case, {**params, "seed": place}, f"separate {place}")
        pool, most = self._core.scheduler.kv_cache.pool, 0
        while self._core.has_unfinished_requests():
            self._core.step()
            most = max(most, pool.num_usable - pool.num_free)
        self._core.check_integrity()
        return most

    def _add(self, case: Case, params: dict[str, Any], cache_salt: str) -> None:
        prompt = pack_token_ids(self._text[: case.num_prompt_tokens], "input_ids")
        self._core.add_request(AddRequest(self._uid, prompt, params, cache_salt=cache_salt))
        self._uid += 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.shared_blocks")
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 8], help="sequences")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--max-tokens", type=int, default=128, help="of the output")
    options = parser.parse_args(arguments)
    blocks = SharedBlocks(options.max_tokens, max(options.counts))
    print("| request | prompt, output | blocks | as separate requests | saved |")
    print("|---|---|---|---|---|")
    for kind in _KINDS:
        for count in options.counts:
            for num_prompt_tokens in options.prompt_tokens:
                case = Case(kind, count, num_prompt_tokens)
                own = blocks.most_blocks(case, shared=True)
                separate = blocks.most_blocks(case, shared=False)
                print(
                    f"| `{kind}` {count} | {num_prompt_tokens}, {options.max_tokens} "
                    f"| {own} | {separate} | {1 - own / separate:.0%} |"
                )


if __name__ == "__main__":
    main()
