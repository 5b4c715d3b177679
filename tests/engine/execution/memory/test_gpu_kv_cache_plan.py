"""The KV cache that is planned from the memory profile of a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.errors import InsufficientMemoryError
from engine.execution.devices import ResolvedConfig, resolve
from engine.execution.memory.gpu_memory_profile import MemoryProfile
from engine.execution.memory.kv_cache_plan import (
    KVCachePlan,
    kv_cache_dtype,
    plan_kv_cache,
)
from engine.models.registry import read_model_spec
from engine.models.spec import ModelSpec
from tests.factories.checkpoints import write_checkpoint

CUDA = torch.device("cuda")
GIB = 2**30
# 2 (K, V) x 3 layers x 2 heads x 16 dims x 2 bytes, times 16 tokens.
BLOCK = 2 * 3 * 2 * 16 * 2 * 16


@pytest.fixture(scope="module")
def model_spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path)
    return read_model_spec(path)


def config(**settings: object) -> ResolvedConfig:
    return resolve(EngineConfig.parse(settings), torch.device("cpu"))


def plan(model_spec: ModelSpec, profile: MemoryProfile, **settings: int) -> KVCachePlan:
    return plan_kv_cache(
        config(**settings),
        model_spec,
        max_model_len=settings.get("max_model_len", 128),
        dtype=torch.bfloat16,
        model_dtype=torch.bfloat16,
        device=CUDA,
        profile=profile,
    )


def profile(
    *,
    total: int = 1000 * BLOCK,
    weights: int = 500 * BLOCK,
    activations: int = 100 * BLOCK,
    libraries: int = 10 * BLOCK,
    graphs: int = 0,
    others: int = 0,
) -> MemoryProfile:
    """Return a profile in which nothing else takes memory than what it names."""
    free = max(0, total - weights - activations - graphs - libraries - others)
    return MemoryProfile(total, weights, activations, graphs, libraries, free)


def test_the_cache_gets_what_the_share_has_left(model_spec: ModelSpec) -> None:
    assert plan(model_spec, profile()).num_blocks == 900 - 500 - 100 - 10
    # Others may take what is not our share, and no more.
    assert plan(model_spec, profile(others=100 * BLOCK)).num_blocks == 290
    assert plan(model_spec, profile(others=150 * BLOCK)).num_blocks == 240
    assert plan(model_spec, profile(), max_num_seqs=2).num_blocks == 2 * 8 + 1
    assert plan(model_spec, profile(graphs=40 * BLOCK)).num_blocks == 250


def test_a_size_that_is_given_counts_instead_of_the_share(model_spec: ModelSpec) -> None:
    assert plan(model_spec, profile(), kv_cache_memory_bytes=390 * BLOCK).num_blocks == 390
    assert plan(model_spec, profile(), num_gpu_blocks_override=390).num_blocks == 390
    for settings in ({"kv_cache_memory_bytes": 391 * BLOCK}, {"num_gpu_blocks_override": 391}):
        with pytest.raises(
            InsufficientMemoryError, match=rf"^{next(iter(settings))}: .* of activations; lower it$"
        ):
            plan(model_spec, profile(), **settings)


@pytest.mark.parametrize(
    ("found", "settings", "message"),
    [
        (
            profile(total=20 * GIB, weights=19 * GIB, activations=GIB, libraries=0),
            {},
            r"^model: the weights take 19\.00 GiB, which leaves nothing of the 18\.00 GiB that "
            r"gpu_memory_utilization 0\.9 gives of 20\.00 GiB; choose a smaller model or dtype, "
            r"or raise gpu_memory_utilization$",
        ),
        (
            profile(total=20 * GIB, weights=15 * GIB, activations=3 * GIB, libraries=GIB),
            {},
            r"^max_num_batched_tokens: a step of 2048 tokens takes 3\.00 GiB beside 16\.00 GiB of "
            r"the model, which leaves no KV cache of the 18\.00 GiB .*; lower "
            r"max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization$",
        ),
        (
            profile(weights=786 * BLOCK),
            {"max_model_len": 128},
            r"^max_model_len: one sequence of 128 tokens needs \d\.\d\d MiB of KV cache, but "
            r"only 3 blocks of 16 tokens fit beside .* of the model and .* of activations; lower "
            r"max_model_len to at most 48 or raise gpu_memory_utilization or lower "
            r"max_num_batched_tokens or set kv_cache_dtype to fp8$",
        ),
        (
            profile(weights=789 * BLOCK),  # the null block alone
            {},
            r"only 0 blocks of 16 tokens fit .* of activations; raise gpu_memory_utilization or",
        ),
        (
            profile(),
            {"max_model_len": 128, "kv_cache_memory_bytes": 5 * BLOCK},
            r"; lower max_model_len to at most 64 or raise kv_cache_memory_bytes or set kv_cache_",
        ),
        (
            profile(),
            {"max_model_len": 128, "num_gpu_blocks_override": 5},
            r"; lower max_model_len to at most 64 or raise num_gpu_blocks_override$",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_to_set(
    model_spec: ModelSpec, found: MemoryProfile, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(InsufficientMemoryError, match=message):
        plan(model_spec, found, **settings)


def test_a_length_that_nobody_asked_for_is_lowered(model_spec: ModelSpec) -> None:
    assert plan(model_spec, profile(weights=786 * BLOCK)).max_model_len == 48


SIZES = st.integers(0, 1000 * BLOCK)


@given(
    weights=SIZES,
    activations=SIZES,
    libraries=SIZES,
    graphs=SIZES,
    others=SIZES,
    utilization=st.floats(0.01, 1),
)
def test_the_cache_fits_beside_all_else(
    model_spec: ModelSpec,
    weights: int,
    activations: int,
    libraries: int,
    graphs: int,
    others: int,
    utilization: float,
) -> None:
    found = profile(
        weights=weights,
        activations=activations,
        libraries=libraries,
        graphs=graphs,
        others=others,
    )
    own = weights + activations + libraries + graphs
    room = min(int(found.total * utilization), found.total - others) - own
    settings = config(gpu_memory_utilization=utilization, max_num_seqs=512)
    try:
        planned = plan_kv_cache(
            settings,
            model_spec,
            max_model_len=128,
            dtype=torch.bfloat16,
            model_dtype=torch.bfloat16,
            device=CUDA,
            profile=found,
        )
    except InsufficientMemoryError:
        assert room // BLOCK < 2
    else:
        assert planned.num_bytes == planned.num_blocks * BLOCK <= room < planned.num_bytes + BLOCK


def test_float8_holds_twice_the_tokens(model_spec: ModelSpec) -> None:
    dtype = kv_cache_dtype(config(kv_cache_dtype="fp8"), torch.bfloat16)
    assert dtype == kv_cache_dtype(config(kv_cache_dtype="fp8_e4m3"), torch.bfloat16)
    assert kv_cache_dtype(config(), torch.bfloat16) == torch.bfloat16
    planned = plan_kv_cache(
        config(max_num_seqs=512),
        model_spec,
        max_model_len=128,
        dtype=dtype,
        model_dtype=dtype,
        device=CUDA,
        profile=profile(),
    )
    assert planned.num_blocks == 2 * plan(model_spec, profile()).num_blocks == 2 * 290
    assert planned.num_bytes == 290 * BLOCK
    with pytest.raises(InsufficientMemoryError, match=r"or lower max_num_batched_tokens$"):
        plan_kv_cache(
            config(kv_cache_dtype="fp8", max_model_len=128),
            model_spec,
            max_model_len=128,
            dtype=dtype,
            model_dtype=dtype,
            device=CUDA,
            profile=profile(weights=788 * BLOCK),
        )
