"""The KV memory that sliding windows save in models as published: the table of the README."""

import re
from typing import NamedTuple

import pytest

from engine.core.kv.group_windows import GroupWindows, blocks_for
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.models.kv_groups import KVGroups, group_layers
from tests.factories.readmes import ROOT
from tests.factories.requests import make_request

BLOCK, BYTES = 16, 2  # tokens; of a bfloat16
TOKENS, OUTPUT, STEP = 32768, 256, 2048
GIB = 2**30


class Model(NamedTuple):
    """Layers with `window`, but every `every`-th, which sees all; 0: none does."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    every: int

    def gib(self, groups: KVGroups, blocks: int) -> float:
        per_token = 2 * groups.num_caches * self.num_kv_heads * self.head_dim * BYTES
        return blocks * per_token * BLOCK / GIB


MODELS = {
    "Mistral-7B-v0.1": Model(32, 8, 128, 4096, 0),
    "Gemma 2 9B": Model(42, 8, 256, 4096, 2),
    "Gemma 3 12B": Model(48, 8, 256, 1024, 6),
    "gpt-oss-20b": Model(24, 8, 64, 128, 2),
}


def held(groups: KVGroups) -> tuple[int, int]:
    """Return the blocks of a sequence, prefilled in steps and then decoded: most, at its end."""
    windows = GroupWindows(groups.windows, BLOCK, max_step_tokens=STEP)
    num_blocks = len(groups.windows) * (blocks_for(TOKENS, BLOCK) + 1)
    cache = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=False, windows=windows)
    prompt = TOKENS - OUTPUT
    request = make_request(0, [0] * prompt, max_tokens=OUTPUT)
    most = now = 0
    while request.num_computed_tokens < TOKENS:
        left = prompt - request.num_computed_tokens
        new = min(left, STEP) if left > 0 else 1
        assert cache.allocate(request, new, reserve=left > 0) is not None
        request.num_computed_tokens += new
        now = cache.pool.num_usable - cache.pool.num_free
        most = max(most, now)
    cache.check_integrity([request])
    return most, now


@pytest.mark.parametrize("name", MODELS)
def test_the_readme_has_what_a_sequence_holds(name: str) -> None:
    model = MODELS[name]
    layers = range(1, model.num_layers + 1)
    sees_all = [bool(model.every) and layer % model.every == 0 for layer in layers]
    groups = group_layers([None if every else model.window for every in sees_all], TOKENS)
    single = KVGroups.single(model.num_layers)
    before = model.gib(single, held(single)[0])
    most, end = (model.gib(groups, blocks) for blocks in held(groups))
    cells = (
        f"{len(groups.windows)} of {groups.num_caches} layers",
        *(f"{size:.2f}" for size in (before, most, end)),
        f"{40 // before:.0f} -> {40 // end:.0f}",
    )
    readme = (ROOT / "engine/models/README.md").read_text()
    (row,) = re.findall(rf"^\| {name} \| (.*) \|$", readme, re.MULTILINE)
    assert tuple(row.split(" | ")) == cells
