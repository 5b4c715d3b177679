"""What is measured on a GPU, on a device that only counts; and the cache that is planned by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import InsufficientMemoryError
from engine.execution.gpu_memory_profile import MemoryProfile, memory_before_loading, profile_memory
from engine.execution.kv_cache_plan import (
    KVCachePlan,
    kv_cache_dtype,
    plan_kv_cache,
    require_room_for_weights,
)
from engine.models.model_config import ModelConfig
from tests.factories.checkpoints import write_checkpoint

CUDA = torch.device("cuda")
GIB = 2**30
# 2 (K, V) x 3 layers x 2 heads x 16 dims x 2 bytes, times 16 tokens.
BLOCK = 2 * 3 * 2 * 16 * 2 * 16


class Gpu:
    """A device of 80 GiB, in which torch's allocator keeps what is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = GIB
        self.libraries = 0
        self.allocated = self.reserved = self.peak = 0
        functions: dict[str, Callable[..., object]] = {
            "mem_get_info": lambda _: (self.free, 80 * GIB),
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.reserved,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": self._empty_cache,
            "synchronize": lambda _: None,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @property
    def free(self) -> int:
        return 80 * GIB - self.others - self.libraries - self.reserved

    def allocate(self, num_bytes: int) -> None:
        if self.allocated + num_bytes - self.reserved > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)

    def release(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def _reset_peak(self, _: torch.device) -> None:
        self.peak = self.allocated

    def _empty_cache(self) -> None:
        self.reserved = self.allocated


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path)
    return ModelConfig.from_hf(path)


def config(**settings: object) -> EngineConfig:
    return EngineConfig.parse(settings)


def test_the_profile_holds_the_peak_and_not_what_loading_took(gpu: Gpu) -> None:
    gpu.allocate(2 * GIB)  # somebody's else in this process
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.allocate(30 * GIB)  # of which a part only while it is loaded
    gpu.release(14 * GIB)

    def run() -> None:
        gpu.libraries += GIB // 2
        gpu.allocate(3 * GIB)
        gpu.release(2 * GIB)
        gpu.allocate(GIB)
        gpu.release(GIB)

    found = profile_memory(config(), before, run, CUDA)
    assert found == MemoryProfile(
        total=80 * GIB,
        weights=16 * GIB,
        activations=3 * GIB,
        libraries=GIB // 2,
        free=(80 - 1 - 2 - 16 - 3) * GIB - GIB // 2,
    )
    assert found.summary == (
        "the model takes 16.00 GiB, libraries 0.50 GiB and the largest step 3.00 GiB of 80.00 GiB"
    )


def test_what_other_processes_do_meanwhile(gpu: Gpu) -> None:
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.others = 0
    freed = profile_memory(config(), before, lambda: None, CUDA)
    assert (freed.libraries, freed.free) == (0, 80 * GIB)
    gpu.others = 50 * GIB
    taken = profile_memory(config(), before, lambda: None, CUDA)
    assert taken.free == 30 * GIB


def test_a_step_that_finds_no_memory_says_which_setting_to_lower(gpu: Gpu) -> None:
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.allocate(60 * GIB)
    with pytest.raises(
        InsufficientMemoryError,
        match=r"^max_num_batched_tokens: a step of 4096 tokens does not fit into the 19\.00 GiB of "
        r"memory free on cuda beside 60\.00 GiB of weights; lower max_num_batched_tokens or max_nu",
    ):
        profile_memory(
            config(max_num_batched_tokens=4096), before, lambda: gpu.allocate(20 * GIB), CUDA
        )


def test_a_share_that_others_hold_is_refused_before_anything_is_loaded(gpu: Gpu) -> None:
    gpu.others = 20 * GIB
    with pytest.raises(
        InsufficientMemoryError,
        match=r"^gpu_memory_utilization: 0\.9 of 80\.00 GiB is 72\.00 GiB, but only "
        r"60\.00 GiB of memory is free on cuda; end what else uses it, or .* to at most 0\.75$",
    ):
        memory_before_loading(config(), CUDA)
    assert memory_before_loading(config(gpu_memory_utilization=0.75), CUDA) is not None
    # With these, the share does not matter.
    assert memory_before_loading(config(kv_cache_memory_bytes=GIB), CUDA) is not None
    assert memory_before_loading(config(num_gpu_blocks_override=9), CUDA) is not None


def test_what_an_earlier_engine_has_given_back_is_free(gpu: Gpu) -> None:
    gpu.allocate(60 * GIB)
    gpu.release(60 * GIB)  # torch's allocator keeps it
    assert memory_before_loading(config(), CUDA) is not None


def test_weights_that_exceed_the_share_are_refused_before_they_are_loaded(gpu: Gpu) -> None:
    require_room_for_weights(71 * GIB, CUDA, config())
    with pytest.raises(InsufficientMemoryError, match=r"^model: it takes 72\.00 GiB, which leaves"):
        require_room_for_weights(72 * GIB, CUDA, config())
    require_room_for_weights(79 * GIB, CUDA, config(num_gpu_blocks_override=9))
    with pytest.raises(
        InsufficientMemoryError, match=r"^model: its weights need 79\.50 GiB, but on"
    ):
        require_room_for_weights(159 * GIB // 2, CUDA, config(num_gpu_blocks_override=9))


def test_a_cpu_is_not_measured() -> None:
    assert memory_before_loading(config(), torch.device("cpu")) is None


def plan(model_config: ModelConfig, profile: MemoryProfile, **settings: int) -> KVCachePlan:
    return plan_kv_cache(
        config(**settings),
        model_config,
        max_model_len=settings.get("max_model_len", 128),
        dtype=torch.bfloat16,
        device=CUDA,
        profile=profile,
    )


def profile(
    *,
    total: int = 1000 * BLOCK,
    weights: int = 500 * BLOCK,
    activations: int = 100 * BLOCK,
    libraries: int = 10 * BLOCK,
    others: int = 0,
) -> MemoryProfile:
    """Return a profile in which nothing else takes memory than what it names."""
    free = max(0, total - weights - activations - libraries - others)
    return MemoryProfile(total, weights, activations, libraries, free)


def test_the_cache_gets_what_the_share_has_left(model_config: ModelConfig) -> None:
    assert plan(model_config, profile()).num_blocks == 900 - 500 - 100 - 10
    # Others may take what is not our share, and no more.
    assert plan(model_config, profile(others=100 * BLOCK)).num_blocks == 290
    assert plan(model_config, profile(others=150 * BLOCK)).num_blocks == 240
    assert plan(model_config, profile(), max_num_seqs=2).num_blocks == 2 * 8 + 1


def test_a_size_that_is_given_counts_instead_of_the_share(model_config: ModelConfig) -> None:
    assert plan(model_config, profile(), kv_cache_memory_bytes=390 * BLOCK).num_blocks == 390
    assert plan(model_config, profile(), num_gpu_blocks_override=390).num_blocks == 390
    for settings in ({"kv_cache_memory_bytes": 391 * BLOCK}, {"num_gpu_blocks_override": 391}):
        with pytest.raises(
            InsufficientMemoryError, match=rf"^{next(iter(settings))}: .* of activations$"
        ):
            plan(model_config, profile(), **settings)


@pytest.mark.parametrize(
    ("found", "settings", "message"),
    [
        (
            profile(total=20 * GIB, weights=19 * GIB, activations=GIB, libraries=0),
            {},
            r"^model: it takes 19\.00 GiB, which leaves nothing of the 18\.00 GiB that "
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
            r"^max_model_len: one sequence of 128 tokens needs 0\.00 GiB of KV cache, but only 3 "
            r"blocks of 16 tokens fit beside .* GiB of the model and .* GiB of activations; lower "
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
    model_config: ModelConfig, found: MemoryProfile, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(InsufficientMemoryError, match=message):
        plan(model_config, found, **settings)


def test_a_length_that_nobody_asked_for_is_lowered(model_config: ModelConfig) -> None:
    assert plan(model_config, profile(weights=786 * BLOCK)).max_model_len == 48


SIZES = st.integers(0, 1000 * BLOCK)


@given(
    weights=SIZES,
    activations=SIZES,
    libraries=SIZES,
    others=SIZES,
    utilization=st.floats(0.01, 1),
)
def test_the_cache_fits_beside_all_else(
    model_config: ModelConfig,
    weights: int,
    activations: int,
    libraries: int,
    others: int,
    utilization: float,
) -> None:
    found = profile(weights=weights, activations=activations, libraries=libraries, others=others)
    own = weights + activations + libraries
    room = min(int(found.total * utilization), found.total - others) - own
    settings = config(gpu_memory_utilization=utilization, max_num_seqs=512)
    try:
        planned = plan_kv_cache(
            settings,
            model_config,
            max_model_len=128,
            dtype=torch.bfloat16,
            device=CUDA,
            profile=found,
        )
    except InsufficientMemoryError:
        assert room // BLOCK < 2
    else:
        assert planned.num_bytes == planned.num_blocks * BLOCK <= room < planned.num_bytes + BLOCK


def test_float8_holds_twice_the_tokens(model_config: ModelConfig) -> None:
    dtype = kv_cache_dtype(config(kv_cache_dtype="fp8"), torch.bfloat16)
    assert dtype == kv_cache_dtype(config(kv_cache_dtype="fp8_e4m3"), torch.bfloat16)
    assert kv_cache_dtype(config(), torch.bfloat16) == torch.bfloat16
    planned = plan_kv_cache(
        config(max_num_seqs=512),
        model_config,
        max_model_len=128,
        dtype=dtype,
        device=CUDA,
        profile=profile(),
    )
    assert planned.num_blocks == 2 * plan(model_config, profile()).num_blocks == 2 * 290
    assert planned.num_bytes == 290 * BLOCK
    with pytest.raises(InsufficientMemoryError, match=r"or lower max_num_batched_tokens$"):
        plan_kv_cache(
            config(kv_cache_dtype="fp8", max_model_len=128),
            model_config,
            max_model_len=128,
            dtype=dtype,
            device=CUDA,
            profile=profile(weights=788 * BLOCK),
        )
