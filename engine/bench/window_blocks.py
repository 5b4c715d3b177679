"""`python -m engine.bench.window_blocks`: KV memory that sliding windows save, by model.

A sequence is computed in chunks and then decoded by the KV cache manager alone: its blocks are
counted after each step, in groups of layers, and in one group of all layers that see all tokens.
Shapes are those of published models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.bench.tables import markdown
from engine.core.kv.group_windows import GroupWindows, blocks_for
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.models.kv_groups import KVGroups, group_layers
from engine.sampling_params import SamplingParams

_BLOCK_SIZE = 16
_BYTES = 2  # of a bfloat16
_OUTPUT = 256  # tokens
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Layers with `window`, but every `every`-th, which sees all; 0: none does."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    every: int

    @property
    def windows(self) -> list[int | None]:
        """Of each layer."""
        return [
            None if self.every and (i + 1) % self.every == 0 else self.window
            for i in range(self.num_layers)
        ]

    def block_bytes(self, groups: KVGroups) -> int:
        """Return the bytes of a block of one group."""
        per_token = 2 * groups.num_caches * self.num_kv_heads * self.head_dim * _BYTES
        return per_token * _BLOCK_SIZE


MODELS = (
    Model("Mistral-7B-v0.1", 32, 8, 128, 4096, 0),
    Model("Gemma 2 9B", 42, 8, 256, 4096, 2),
    Model("Gemma 3 12B", 48, 8, 256, 1024, 6),
    Model("gpt-oss-20b", 24, 8, 64, 128, 2),
)


def most_blocks(groups: KVGroups, num_tokens: int, max_step_tokens: int) -> tuple[int, int]:
    """Return the blocks that a sequence of `num_tokens` holds: at most, and at its end."""
    windows = GroupWindows(groups.windows, _BLOCK_SIZE, max_step_tokens=max_step_tokens)
    num_blocks = len(groups.windows) * (blocks_for(num_tokens, _BLOCK_SIZE) + 1)
    cache = KVCacheManager(num_blocks, _BLOCK_SIZE, enable_prefix_caching=False, windows=windows)
    prompt = np.zeros(num_tokens - _OUTPUT, dtype=np.int32)
    request = Request(0, prompt, SamplingParams(), max_tokens=_OUTPUT, seed=0)
    most = 0
    while request.num_computed_tokens < num_tokens:
        left = len(prompt) - request.num_computed_tokens
        num_new = min(left, max_step_tokens) if left > 0 else 1
        assert cache.allocate(request, num_new, reserve=left > 0) is not None
        request.num_computed_tokens += num_new
        most = max(most, cache.pool.num_usable - cache.pool.num_free)
    cache.check_integrity([request])
    return most, cache.pool.num_usable - cache.pool.num_free


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.window_blocks")
    parser.add_argument("--tokens", type=int, default=32768, help="of the sequence")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--gib", type=float, default=40, help="of KV cache")
    options = parser.parse_args(arguments)
    if not options.tokens > _OUTPUT:
        parser.error(f"--tokens must exceed the {_OUTPUT} of the output")
    rows = []
    for model in MODELS:
        single = KVGroups.single(model.num_layers)
        groups = group_layers(model.windows, options.tokens)
        before = most_blocks(single, options.tokens, options.step_tokens)[0]
        most, decoding = most_blocks(groups, options.tokens, options.step_tokens)
        counts = ((before, single), (most, groups), (decoding, groups))
        old, new, end = (count * model.block_bytes(each) / _GIB for count, each in counts)
        rows.append(
            (
                *(model.name, f"{len(groups.windows)} of {groups.num_caches} layers"),
                *(f"{size:.2f}" for size in (old, new, end)),
                f"{options.gib // old:.0f} -> {options.gib // end:.0f}",
            )
        )
    header = ("model", "groups", "all tokens, GiB", "groups, GiB", "decoding, GiB")
    print(markdown((*header, f"fit {options.gib:g} GiB"), rows, left=2))


if __name__ == "__main__":
    main()
