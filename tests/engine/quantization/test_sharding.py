"""The ranks of a quantised model compute what it computes alone, wherever it is cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.checkpoint.hub import resolve_checkpoint
from engine.checkpoint.tensor_files.headers import read_headers
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.models.build import build_model, shard_of
from engine.models.registry import read_model_spec
from engine.models.sharding import max_ranks, shard
from engine.quantization.linear import QuantizedLinear
from engine.quantization.registry import read_quantization
from engine.weights import load_weights
from kernels.cpu import linear as panels
from tests.factories.families import FAMILIES
from tests.factories.forms import runs_panels
from tests.factories.gguf_checkpoints import write
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import FORMATS, write_quantized
from tests.factories.thread_ranks import ThreadGroup, ThreadGroups

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]
# Layouts of their own: stacked projections, experts in one tensor or in many, shared experts.
CASES = [
    *((name, "qwen2") for name in FORMATS),
    ("awq", "phi3-fused"),
    ("compressed-w4a16", "phi3-fused"),
    ("compressed-fp8-block", "phi3-fused"),
    ("bitsandbytes-nf4-nested", "phi3-fused"),
    ("fp8-static", "falcon"),
    ("awq", "mixtral"),
    ("gptq-v2-desc-act", "qwen3-moe"),
    ("fp8-blocks", "qwen2-moe"),
    ("compressed-nvfp4", "qwen3-moe"),
    ("mxfp4", "gpt-oss"),
    ("fp8-blocks", "gemma2"),
]


# Three cut most sizes unevenly.
NUM_RANKS = pytest.mark.parametrize(
    "num_ranks",
    [
        3,
        pytest.param(2, marks=pytest.mark.large),
        pytest.param(4, marks=pytest.mark.large),
    ],
)


def assert_ranks_match(checkpoint: Path, num_ranks: int, *, expert_parallel: bool = False) -> None:
    """Assert that the logits of `num_ranks`, or the most that can be, are one process's."""
    whole = PagedModel(checkpoint)
    num_ranks = min(num_ranks, max_ranks(whole.spec, expert_parallel=expert_parallel))
    expected = whole.logits(TOKENS)

    def rank(group: ThreadGroup) -> torch.Tensor:
        model = PagedModel(checkpoint, group=group, expert_parallel=expert_parallel)
        return model.logits(TOKENS)

    logits, *_ = ThreadGroups(num_ranks).run(rank)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@NUM_RANKS
@pytest.mark.parametrize(("name", "family"), CASES)
def test_ranks_logits_match_the_whole_model(
    name: str, family: str, num_ranks: int, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    _, quantized = write_quantized(name, tmp_path, architecture, **fields)
    assert_ranks_match(quantized, num_ranks)


@NUM_RANKS
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("awq", "mixtral"),
        ("fp8-blocks", "qwen2-moe"),
        ("compressed-nvfp4", "qwen3-moe"),
        ("mxfp4", "gpt-oss"),
        ("gptq-v2-desc-act", "glm-moe"),
    ],
)
def test_ranks_with_whole_experts_match_the_whole_model(
    name: str, family: str, num_ranks: int, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    _, quantized = write_quantized(name, tmp_path, architecture, **fields)
    assert_ranks_match(quantized, num_ranks, expert_parallel=True)


GGUF_CASES = [
    *(("llama", (kind,)) for kind in ("Q8_0", "Q4_1", "Q6_K", "Q4_K", "IQ4_XS", "MXFP4", "BF16")),
    ("llama-biases", ("Q8_0", "Q4_K", "Q6_K", "Q5_0", "F16")),
    ("llama-tied", ("Q4_K", "Q5_1")),
    ("phi3", ("Q8_0", "Q2_K")),
    ("gemma3", ("Q3_K", "Q4_0")),
    ("gpt-oss", ("MXFP4", "Q8_0")),
    ("mixtral", ("Q4_K", "Q6_K")),
    ("qwen2-moe", ("IQ4_NL", "Q5_K")),
]


@NUM_RANKS
@pytest.mark.parametrize(("family", "kinds"), GGUF_CASES)
def test_ranks_of_a_gguf_file_match_the_whole_model(
    family: str,
    kinds: tuple[str, ...],
    num_ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = resolve_checkpoint(str(write(tmp_path, family, *kinds)))
    assert_ranks_match(checkpoint, num_ranks)
    if family in ("gpt-oss", "mixtral", "qwen2-moe"):
        assert_ranks_match(checkpoint, num_ranks, expert_parallel=True)


@pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU")
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_integers_of_a_rank_stay_what_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "serves", panels.runs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = resolve_checkpoint(str(write(tmp_path, "llama", kind)))
    expected = PagedModel(checkpoint).logits(TOKENS)
    whole = PagedModel(checkpoint, dtype=torch.bfloat16).logits(TOKENS)

    def rank(group: ThreadGroup) -> torch.Tensor:
        model = PagedModel(checkpoint, dtype=torch.bfloat16, group=group)
        head = model.model.lm_head or model.model.model.embed_tokens.head
        layers = model.model.model.layers
        linears = [(each.self_attn.qkv_proj, each.mlp.gate_up_proj) for each in layers]
        for linear in (head, layers[0].self_attn.o_proj, layers[0].mlp.down_proj, *linears[0]):
            assert isinstance(linear, CpuPackedLinear)
            assert linear.tensors()["weight"].dtype == torch.uint8
        return model.logits(TOKENS)

    logits, *_ = ThreadGroups(2).run(rank)
    error, own = ((each - expected).square().mean().sqrt() for each in (logits, whole))
    assert error < 2 * own


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_ranks_read_each_byte_of_their_rows_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is summed over them, of which they have columns, whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = resolve_checkpoint(str(write(tmp_path, "llama", kind)))
    sizes = {name: tensor.num_bytes for name, tensor in read_headers(checkpoint).items()}
    shared = ("attn_output.weight", "ffn_down.weight", "norm.weight")
    whole = sum(size for name, size in sizes.items() if name.endswith(shared))
    for num_ranks in (1, 2):  # more would share its two KV heads
        read = [bytes_read(checkpoint, rank, num_ranks) for rank in range(num_ranks)]
        assert sum(read) == sum(sizes.values()) + (num_ranks - 1) * whole


def bytes_read(checkpoint: Path, rank: int, num_ranks: int) -> int:
    build = partial(
        build_model,
        max_model_len=16,
        dtype=torch.float32,
        quantization=read_quantization(checkpoint),
    )
    spec, totals = read_model_spec(checkpoint), [0]
    whole = build(spec, device=torch.device("meta"))
    part = shard_of(whole, rank, num_ranks)
    load_weights(
        build(part, device=torch.device("cpu")),
        checkpoint,
        whole=whole if num_ranks > 1 else None,
        on_progress=lambda done, total: totals.append(done),
    )
    return max(totals)


def test_memory_of_a_rank_that_dequantises_a_whole_projection(tmp_path: Path) -> None:
    _, quantized = write_quantized("bitsandbytes-nf4", tmp_path)
    whole = PagedModel(quantized).spec
    build = partial(
        build_model,
        max_model_len=16,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        quantization=read_quantization(quantized),
    )
    rank = build(shard(whole, 1, 2))
    largest = max(
        module.num_bytes_while_dequantized
        for module in rank.modules()
        if isinstance(module, QuantizedLinear)
    )
    assert largest == 4 * whole.hidden_size * whole.layers[0].mlp.size
