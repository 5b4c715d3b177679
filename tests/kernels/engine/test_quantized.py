"""Quantised checkpoints on our kernels compute what the weights that they stand for do.

They stay as they are stored: a projection is a product of its own, not one of floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, SamplingParams
from engine.errors import UnsupportedError
from engine.layers.linear.fp8 import Fp8Gated, Fp8Linear, Fp8Norm
from engine.layers.linear.linear import Linear
from engine.layers.wna16 import WNA16Linear
from engine.models.build import build_model, shard_of
from engine.models.linear_methods import gpu_linear_of_stored
from engine.models.registry import read_model_spec
from engine.models.sharding import SUMMED
from engine.quantization.fp8 import Fp8
from engine.quantization.linear import QuantizedLinear
from engine.quantization.registry import read_quantization
from engine.quantization.stored import Window
from engine.weights import SINGLE, load_weights
from kernels import device
from kernels.quantized.rows import quantize_rows
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.quantized import FORMATS, write_quantized
from tests.factories.quantizers import fp8
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.support import DEVICE, assert_close, randn

pytestmark = pytest.mark.usefixtures("small_gpu")

SMALL = {"num_hidden_layers": 1, "head_dim": 32}
# Blocks that are served need a multiple of 128 inputs; of 64 keys' channels they are short.
BLOCKS = "fp8-blocks-128"
SIZES = {
    BLOCKS: {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8},
    # A block of 64 weights may not be of two rows.
    **{name: {"intermediate_size": 128} for name in FORMATS if name.startswith("bitsandbytes")},
}
NOT_SERVED = {"fp8-blocks"}  # of 24 inputs, which no run of a matrix product divides
PERMUTED = {"gptq-v2-desc-act", "compressed-w4a16-actorder"}
STATIC = {"fp8-static", "fp8-static-transformers", "modelopt-fp8"}  # scales of activations
IN_FP8 = {"compressed-fp8-channel", BLOCKS, *STATIC}
PROMPTS = [[5 + 3 * i for i in range(length)] for length in (20, 3)]


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantizer = fp8("weight_scale_inv", "block", block=128)
    monkeypatch.setitem(FORMATS, BLOCKS, (config, quantizer))


def without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the GPU one that does not multiply FP8."""
    limits = replace(device.limits(DEVICE), capability=(8, 0))
    monkeypatch.setattr(device, "limits", lambda where: limits)


def load(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, QuantizedLinear]]:
    """Return a checkpoint's weights as floats, and its projections by their names."""
    plain, quantized = write_quantized(name, folder, **SMALL, **SIZES.get(name, {}))
    (found,) = projections(quantized)
    return load_file(plain / SINGLE), found


def projections(checkpoint: Path, num_ranks: int = 1) -> Iterator[dict[str, QuantizedLinear]]:
    """Yield the projections of each rank by their names."""
    build = partial(
        build_model,
        max_model_len=16,
        dtype=torch.float16,
        quantization=read_quantization(checkpoint),
    )
    spec = read_model_spec(checkpoint)
    whole = build(spec, device=torch.device("meta"))
    for rank in range(num_ranks):
        model = build(shard_of(whole, rank, num_ranks), device=DEVICE)
        load_weights(model, checkpoint, whole=whole if num_ranks > 1 else None)
        yield {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }


def fp8_of(
    name: str, block: tuple[int, int], rows: int, columns: int, draw: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a weight with scales of blocks, and what it is."""
    codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), columns // block[1], generator=draw) + 0.5
    wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)
    return {"weight": codes, name: scale}, codes.float() * wide


def product_in(form: nn.Module | None) -> nn.Module:
    """Return the product of a form, which may be below an activation."""
    assert form is not None
    return next(each for each in form.modules() if isinstance(each, (Fp8Linear, WNA16Linear)))


def product_of(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """Return x W^T in float32, of the weight as a GPU has it."""
    form = gpu_linear_of_stored(linear, invariant=False)
    if form is None:
        return x.float() @ linear.dequantized().weight.float().t()
    return product_in(form)(x).float() - (0 if linear.bias is None else linear.bias)


@pytest.mark.parametrize("name", [*FORMATS, BLOCKS])
def test_products_of_each_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to those of the weights in float32, with activations in FP8 where products are."""
    floats, modules = load(name, tmp_path)
    assert len(modules) == 4
    for path, module in modules.items():
        # Each part has an order of its own here, where activations are permuted once for all.
        if name in NOT_SERVED or (name in PERMUTED and len(module.stored) > 1):
            assert gpu_linear_of_stored(module, invariant=False) is None
            continue
        parent = path.rpartition(".")[0]
        weight = torch.cat([floats[f"{parent}.{part}.weight"] for part in module.stored]).to(DEVICE)
        bias = 0 if module.bias is None else module.bias.float()
        x = randn(5, weight.shape[1], dtype=torch.float16)
        product = product_in(gpu_linear_of_stored(module, invariant=False))
        assert isinstance(product, Fp8Linear) == (name in IN_FP8)
        rounded = x.float()
        if name in IN_FP8:
            scale = torch.tensor([0.5], device=DEVICE) if name in STATIC else None
            groups = x.view(-1, 128) if name == BLOCKS else x
            codes, scales = quantize_rows(groups, scale)
            rounded = (codes.float() * scales[:, None]).view(x.shape)
        assert_close(product(x), rounded @ weight.t() + bias)
    if name in IN_FP8:
        with monkeypatch.context() as patch:
            without_fp8(patch)
            product = product_in(gpu_linear_of_stored(module, invariant=False))
            assert isinstance(product, WNA16Linear)
            assert_close(product(x), x.float() @ weight.t() + bias)


@pytest.mark.parametrize(
    "name",
    [
        *("awq", "gptq-4", "gptq-v2-desc-act", "compressed-w4a16-asymmetric", "modelopt-nvfp4"),
        *(BLOCKS, "fp8-static", "compressed-fp8-channel", "bitsandbytes-nf4", "compressed-int8"),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_have_their_parts_of_each_weight(
    name: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of activations that no FP8 rounds, the results of ranks are in a row, or add up."""
    without_fp8(monkeypatch)
    sizes = {"intermediate_size": 192, "num_key_value_heads": 4, **SMALL, **SIZES.get(name, {})}
    plain, quantized = write_quantized(name, tmp_path, **sizes)
    floats, ranks = load_file(plain / SINGLE), list(projections(quantized, num_ranks))
    for path in ranks[0]:
        linears, is_summed = [rank[path] for rank in ranks], path.endswith(SUMMED)
        parent, stored = path.rpartition(".")[0], linears[0].stored
        weights = [floats[f"{parent}.{part}.weight"].to(DEVICE) for part in stored]
        x = randn(5, weights[0].shape[1], dtype=torch.float16)
        starts = [0, *accumulate(linear.plain.weight.shape[1] for linear in linears)]
        inputs = [x[:, i:j].contiguous() if is_summed else x for i, j in pairwise(starts)]
        outs = [product_of(*each) for each in zip(linears, inputs, strict=True)]
        if is_summed:
            assert_close(sum(outs).half(), x.float() @ weights[0].t())
            continue
        rows_of = [[part.num_rows for part in linear.stored.values()] for linear in linears]
        parts = [out.split(rows, 1) for out, rows in zip(outs, rows_of, strict=True)]
        for each, weight in zip(zip(*parts, strict=True), weights, strict=True):
            assert_close(torch.cat(each, 1).half(), x.float() @ weight.t())


@pytest.mark.parametrize(
    ("block", "product"),
    [
        ((64, 128), Fp8Linear),
        ((1, 128), Fp8Linear),
        ((48, 32), WNA16Linear),
        ((128, 256), WNA16Linear),
    ],
)
def test_blocks_of_fp8(block: tuple[int, int], product: type[nn.Module]) -> None:
    """Parts whose rows no block divides; activations are FP8 where a block has 128 inputs."""
    parts, depth = {"a": 96, "b": 40}, 256
    plain = Linear(depth, parts, bias=False, dtype=torch.float16, device=torch.device("meta"))
    fmt = Fp8("scale", block=block)
    windows = {part: Window.of(rows, depth, (), is_summed=False) for part, rows in parts.items()}
    formats, names = dict.fromkeys(parts, fmt), {part: part for part in parts}
    linear = QuantizedLinear(plain, windows, formats, names=names, device=DEVICE)
    draw = torch.Generator().manual_seed(0)
    weights = []
    for name, rows in parts.items():
        tensors, weight = fp8_of("scale", block, rows, depth, draw)
        weights.append(weight.to(DEVICE))
        for key, tensor in tensors.items():
            linear.destinations()[f"{name}.{key}"].copy_(tensor)
    form = gpu_linear_of_stored(linear, invariant=False)
    assert isinstance(form, product)
    x = randn(5, depth, dtype=torch.float16)
    rounded = x.float()
    if product is Fp8Linear:
        codes, scales = quantize_rows(x.view(-1, 128))
        rounded = (codes.float() * scales[:, None]).view(x.shape)
    assert_close(form(x), rounded @ torch.cat(weights).t())


@pytest.mark.parametrize("name", ["awq", pytest.param("fp8-static", marks=pytest.mark.large)])
def test_answers_are_those_of_the_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole engine, FP8 without rounding activations."""
    without_fp8(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    found = []
    for folder in write_quantized(name, tmp_path, vocab_size=400, **SMALL):
        byte_level_tokenizer().save_pretrained(folder)
        llm = LLM(str(folder), device=DEVICE.type, dtype="float16", max_model_len=32)
        kinds = {type(each) for each in llm._core._runner.model.model.layers.modules()}
        assert (WNA16Linear in kinds) == (folder.name == "quantized")
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert all(output.logprobs is not None for output in outputs)
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, its in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert [each.logprob for each in mine.values()] == pytest.approx(
                [each.logprob for each in its.values()], abs=0.02
            )


def test_fp8_while_loading(tmp_path: Path) -> None:
    """With `deterministic`: the same bytes alone, and with others in captured steps; close to the
    checkpoint's.
    """
    write_checkpoint(tmp_path, vocab_size=400, **SMALL)
    byte_level_tokenizer().save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, ignore_eos=True)
    settings: dict[str, Any] = {
        "device": DEVICE.type,
        "dtype": "float16",
        "max_model_len": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "async_scheduling": True,
        "enable_prefix_caching": False,
    }
    plain = LLM(str(tmp_path), **settings)
    llm = LLM(str(tmp_path), **settings, quantization="fp8", deterministic=True)
    modules = list(llm._core._runner.model.model.layers.modules())
    assert sum(isinstance(each, Fp8Linear) for each in modules) == 4
    assert sum(isinstance(each, Fp8Gated) for each in modules) == 1
    assert sum(isinstance(each, Fp8Norm) for each in modules) == 2
    (expected,) = plain.generate(PROMPTS[:1], params, use_tqdm=False)
    (alone,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    capturer = ReplayingCapturer()
    if device.INTERPRETED:
        llm._core._runner.capture_graphs(capturer, lambda done, total: None)
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    assert sum(capturer.num_replays) > 0 or not device.INTERPRETED
    assert together[0].outputs[0].logprobs == alone.outputs[0].logprobs
    first, wanted = (
        next(iter(each.outputs[0].logprobs[0].values())).logprob  # type: ignore[index]
        for each in (alone, expected)
    )
    assert first == pytest.approx(wanted, abs=0.2)


def test_what_fp8_is_not_for_is_refused(tmp_path: Path) -> None:
    _, quantized = write_quantized("awq", tmp_path / "awq", **SMALL)
    architecture, fields = FAMILIES["mixtral"]
    write_checkpoint(tmp_path / "mixture", architecture, **{**fields, "head_dim": 32})
    for folder, dtype, message in (
        (quantized, "float16", r"^quantization: fp8 needs a checkpoint of floats \(.* awq"),
        (tmp_path / "mixture", "float16", "^quantization: fp8 is not supported for a mixture"),
        (tmp_path / "mixture", "float32", "^quantization: fp8 needs a dtype of 16 bits"),
    ):
        byte_level_tokenizer().save_pretrained(folder)
        with pytest.raises(UnsupportedError, match=message):
            LLM(str(folder), device=DEVICE.type, dtype=dtype, quantization="fp8")
