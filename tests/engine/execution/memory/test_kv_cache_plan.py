from pathlib import Path

import pytest
import torch

from engine import LLM
from engine.config.engine_config import EngineConfig
from engine.errors import InsufficientMemoryError
from engine.execution import model_weights
from engine.execution.devices import resolve
from engine.execution.memory import kv_cache_plan
from engine.models.registry import read_model_spec
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.tokenizers import byte_level_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path)
    return path


def plan(checkpoint: Path, **settings: int) -> kv_cache_plan.KVCachePlan:
    return kv_cache_plan.plan_kv_cache(
        resolve(EngineConfig.parse(settings), CPU),
        read_model_spec(checkpoint),
        max_model_len=settings.get("max_model_len", 128),
        dtype=torch.float32,
        model_dtype=torch.float32,
        device=CPU,
    )


def test_no_more_blocks_than_all_sequences_can_fill(checkpoint: Path) -> None:
    sized = plan(checkpoint, max_num_seqs=3, block_size=16)
    assert sized.num_blocks == 3 * 128 // 16 + 1
    # 2 (K, V) x 3 layers x 2 heads x 16 dims x 4 bytes per token.
    assert sized.num_bytes == sized.num_blocks * 16 * 2 * 3 * 2 * 16 * 4


def test_the_free_memory_is_shared_with_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 16 * 2 * 3 * 2 * 16 * 4
    monkeypatch.setattr(kv_cache_plan, "_free_bytes", lambda device: 40 * block)
    assert plan(checkpoint).num_blocks == 20


def test_the_size_can_be_given(checkpoint: Path) -> None:
    block = 16 * 2 * 3 * 2 * 16 * 4
    assert plan(checkpoint, kv_cache_memory_bytes=11 * block).num_blocks == 11
    assert plan(checkpoint, num_gpu_blocks_override=12).num_blocks == 12


def test_what_one_sequence_of_a_small_model_needs_is_told(checkpoint: Path) -> None:
    with pytest.raises(
        InsufficientMemoryError, match=r"needs 0\.09 MiB of KV .*; raise kv_cache_memory_bytes$"
    ):
        plan(checkpoint, kv_cache_memory_bytes=1000, max_model_len=128)


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_memory_bytes": 2**50, "max_num_seqs": 2048}, {"num_gpu_blocks_override": 99}],
)
def test_a_size_that_does_not_fit_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    monkeypatch.setattr(kv_cache_plan, "_free_bytes", lambda device: 98 * 16 * 2 * 3 * 2 * 16 * 4)
    with pytest.raises(
        InsufficientMemoryError, match=f"^{next(iter(settings))}: a KV cache of .*; lower it$"
    ):
        plan(checkpoint, **settings)


def test_swap_space_that_the_host_has_not_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_plan, "_free_bytes", lambda device: 3 * 2**30)
    sized = plan(checkpoint, num_gpu_blocks_override=12)

    def swap_space_bytes(gib: float, device: str) -> int:
        config = resolve(EngineConfig.parse({"swap_space": gib}), CPU)
        return kv_cache_plan.swap_space_bytes(config, sized, torch.device(device))

    assert swap_space_bytes(0, "cpu") == 0
    assert swap_space_bytes(2.5, "cpu") == 2.5 * 2**30
    assert swap_space_bytes(3, "cuda") == 3 * 2**30
    # On a CPU the KV cache itself is in the same memory.
    with refuses("insufficient_memory", "swap_space", match=r"3\.00 GiB .* beside the KV cache"):
        swap_space_bytes(3, "cpu")
    with refuses("insufficient_memory", "swap_space", match=r"3\.50 GiB does not fit"):
        swap_space_bytes(3.5, "cuda")


def test_a_length_that_does_not_fit_is_lowered_unless_asked_for(checkpoint: Path) -> None:
    assert plan(checkpoint, num_gpu_blocks_override=5).max_model_len == 64
    with pytest.raises(InsufficientMemoryError, match="lower max_model_len to at most 64"):
        plan(checkpoint, num_gpu_blocks_override=5, max_model_len=128)


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    limit.write_text("1000000\n")
    usage.write_text("500000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(kv_cache_plan, "_CGROUPS", ((tmp_path, *names),))
    with refuses("insufficient_memory", "model"):
        kv_cache_plan.require_room_for_weights(600_001, CPU, resolve(EngineConfig(), CPU))
    kv_cache_plan.require_room_for_weights(600_000, CPU, resolve(EngineConfig(), CPU))
    limit.write_text("max\n")
    kv_cache_plan.require_room_for_weights(600_001, CPU, resolve(EngineConfig(), CPU))


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level_tokenizer().save_pretrained(checkpoint)
    monkeypatch.delattr(model_weights, "initialise_weights")
    monkeypatch.setattr(kv_cache_plan, "_free_bytes", lambda device: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"weights need .* is free on cpu"):
        LLM(str(checkpoint))


def test_a_float8_cache_is_refused_on_a_cpu(checkpoint: Path) -> None:
    byte_level_tokenizer().save_pretrained(checkpoint)
    with refuses("unsupported", "kv_cache_dtype", match="fp8 is for GPUs only"):
        LLM(str(checkpoint), kv_cache_dtype="fp8", device="cpu")
