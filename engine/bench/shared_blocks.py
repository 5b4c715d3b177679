"""`python -m engine.bench.shared_blocks`: the KV memory that sequences of one request share.

The samples (`n`) and the beams (`beam_width`) of a request share the blocks of what they have in
common, and copy a block when they first write into it differently. Each case is run on the bundled
model, and again as so many requests of one sequence that share nothing; the table has the most
blocks that were in use at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from engine.bench.tables import markdown
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.demo.stories import story
from engine.protocol import AddRequest
from engine.token_ids import pack_token_ids

_BLOCK_SIZE = 16


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

    def most_blocks(self, num_prompt_tokens: int, *requests: dict[str, Any]) -> int:
        """Return the most blocks in use at once by requests that share nothing."""
        prompt = pack_token_ids(self._text[:num_prompt_tokens], "input_ids")
        for own in requests:
            params = {"max_tokens": self._max_tokens, "ignore_eos": True, "seed": 0, **own}
            salt = str(self._uid)
            self._core.add_request(AddRequest(self._uid, prompt, params, cache_salt=salt))
            self._uid += 1
        pool, most = self._core.scheduler.kv_cache.pool, 0
        while self._core.has_unfinished_requests():
            self._core.step()
            most = max(most, pool.num_usable - pool.num_free)
        self._core.check_integrity()
        return most


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.shared_blocks")
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 8], help="sequences")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--max-tokens", type=int, default=128, help="of the output")
    options = parser.parse_args(arguments)
    blocks = SharedBlocks(options.max_tokens, max(options.counts))
    rows = []
    for kind, count, num_prompt_tokens in product(
        ("n", "beam_width"), options.counts, options.prompt_tokens
    ):
        own = blocks.most_blocks(num_prompt_tokens, {kind: count})
        separate = blocks.most_blocks(num_prompt_tokens, *[{"seed": i} for i in range(count)])
        lengths = f"{num_prompt_tokens}, {options.max_tokens}"
        saved = f"{1 - own / separate:.0%}"
        rows.append((f"`{kind}` {count}", lengths, str(own), str(separate), saved))
    header = ("request", "prompt, output", "blocks", "as separate requests", "saved")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
