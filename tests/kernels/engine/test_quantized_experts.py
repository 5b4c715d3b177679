"""Experts of quantised checkpoints on our kernels compute what the weights that they stand for do.

They stay as they are stored, but where a comment says why not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, SamplingParams
from engine.checkpoint.hub import resolve_checkpoint
from engine.layers.experts import Experts
from engine.layers.wna16 import WNA16Experts
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.linear_methods import gpu_experts_of_stored
from engine.models.registry import read_model_spec
from engine.quantization.experts import QuantizedExperts
from engine.quantization.registry import read_quantization
from engine.weights import load_weights
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.gguf_files import write_gguf
from tests.factories.quantized import FORMATS, compressed, write_quantized
from tests.factories.quantizers import fp8
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.kernels.support import DEVICE, assert_close, randn

pytestmark = pytest.mark.usefixtures("small_gpu")

SMALL = {"num_hidden_layers": 1, "head_dim": 32}
BLOCKS = "fp8-blocks-32"
SERVED = [
    ("mxfp4", "gpt-oss"),
    ("awq", "mixtral"),
    ("gptq-8-all", "mixtral"),
    ("compressed-w4a16", "qwen3-moe"),
    ("compressed-int8", "qwen2-moe"),
    ("bitsandbytes-8", "mixtral"),
    ("fp8-static", "qwen3-moe"),
    ("compressed-fp8-channel", "mixtral"),
    (BLOCKS, "qwen3-moe"),
    ("modelopt-nvfp4", "qwen3-moe"),
]
NOT_SERVED = [
    ("gptq-v2-desc-act", "qwen3-moe"),  # each expert has an order of its inputs
    ("fp8-blocks", "qwen3-moe"),  # of 24 inputs, which no run of a matrix product divides
]


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compressed(
        "float-quantized", kind="float", bits=8, strategy="block", block_structure=[32, 32]
    )
    monkeypatch.setitem(FORMATS, BLOCKS, (config, fp8("weight_scale", "block", block=32)))


def write(name: str, family: str, folder: Path, **fields: Any) -> tuple[Path, Path]:
    architecture, settings = FAMILIES[family]
    settings = {**settings, **SMALL, **fields, "mlp_only_layers": []}
    return write_quantized(name, folder, architecture, **settings)


def load(folder: Path, dtype: torch.dtype) -> CausalLM:
    model = build_model(
        read_model_spec(folder),
        max_model_len=16,
        dtype=dtype,
        device=DEVICE,
        quantization=read_quantization(folder),
    )
    load_weights(model, folder)
    return model


@pytest.mark.parametrize(("name", "family"), SERVED)
def test_experts_of_each_format(name: str, family: str, tmp_path: Path) -> None:
    check_products(*write(name, family, tmp_path))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    # Offsets of groups are rounded to float16; what has no even steps to 127 of them.
    [("Q8_0", 2e-3), ("Q4_K", 4e-3), ("Q6_K", 2e-2), ("MXFP4", 2e-3)],
)
def test_experts_of_gguf(
    kind: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, file = tmp_path / "plain", tmp_path / "experts.gguf"
    sizes = {"vocab_size": 400, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    architecture, settings = FAMILIES["qwen3-moe"]
    settings = {**settings, **SMALL, **sizes, "mlp_only_layers": []}
    write_checkpoint(plain, architecture, **settings)
    save_tokenizer(byte_level_tokenizer(), plain)
    write_gguf(file, plain, [kind])
    check_products(plain, resolve_checkpoint(str(file)), tolerance)


def check_products(plain: Path, quantized: Path, tolerance: float = 2e-3) -> None:
    """Assert that experts as they are stored give what those of `plain` do."""
    (floats,) = (each for each in load(plain, torch.float32).modules() if isinstance(each, Experts))
    module = load(quantized, torch.float16)
    (stored,) = (each for each in module.modules() if isinstance(each, QuantizedExperts))
    num_experts, hidden_size, _ = floats.down.shape
    # Of few tokens an expert has blocks of 16 rows, of more 128; of many it is written out.
    for num_tokens, invariant in ((5, False), (2, True), (24 * num_experts, False)):
        form = gpu_experts_of_stored(stored, invariant=invariant)
        assert isinstance(form, WNA16Experts)
        x = randn(num_tokens, hidden_size, dtype=torch.float16)
        scores = randn(num_tokens, num_experts, seed=1)
        chosen = scores.argsort(-1)[:, :2].to(torch.int32).contiguous()
        weights = scores.gather(1, chosen.long()).softmax(-1)
        totals = torch.zeros(num_experts, dtype=torch.int64, device=DEVICE)
        expected = floats(x.float(), chosen, weights, totals)
        assert_close(form(x, chosen, weights, totals), expected, tolerance=tolerance)


@pytest.mark.parametrize(("name", "family"), NOT_SERVED)
def test_what_has_no_products_is_converted(name: str, family: str, tmp_path: Path) -> None:
    _, quantized = write(name, family, tmp_path)
    model = load(quantized, torch.float16)
    (stored,) = (each for each in model.modules() if isinstance(each, QuantizedExperts))
    assert gpu_experts_of_stored(stored, invariant=False) is None


def test_answers_of_mxfp4_are_those_of_the_weights(tmp_path: Path) -> None:
    """Through the whole engine."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    found = []
    for folder in write("mxfp4", "gpt-oss", tmp_path, vocab_size=400):
        byte_level_tokenizer().save_pretrained(folder)
        llm = LLM(str(folder), device=DEVICE.type, dtype="float16", max_model_len=32)
        kinds = {type(each) for each in llm._core._runner.model.model.layers.modules()}
        assert (WNA16Experts in kinds) == (folder.name == "quantized")
        prompts = [[5 + 3 * i for i in range(length)] for length in (20, 3)]
        outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, its in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert [each.logprob for each in mine.values()] == pytest.approx(
                [each.logprob for each in its.values()], abs=0.02
            )
