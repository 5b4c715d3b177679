"""Quantised checkpoints compute what the weights that they stand for do, whatever their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.errors import CheckpointError, UnsupportedError
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.quantization.compressed_tensors import Int8Channels
from engine.quantization.format import unpack
from kernels.cpu import linear as panels
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.families import FAMILIES
from tests.factories.forms import runs_panels
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import FORMATS, change_config, compressed, write_quantized
from tests.factories.quantizers import pack_words
from tests.factories.tokenizers import byte_level_tokenizer

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]


@pytest.mark.parametrize("name", FORMATS)
def test_the_logits_are_those_of_the_weights(name: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path)
    expected = PagedModel(plain).logits(TOKENS)
    assert expected.std() > 0.1
    # The forms after conversion sum in another order than the plain linears.
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("awq", "phi3-fused"),
        ("fp8-static", "phi3-fused"),
        ("compressed-w4a16", "phi3-fused"),
        ("fp8-static", "falcon"),
        ("fp8-static-transformers", "ministral3-vision"),
        ("awq", "mixtral"),
        ("compressed-fp8-channel", "glm-moe"),
        ("compressed-w4a16", "ernie-moe"),
        ("gptq-v2-desc-act", "qwen3-moe"),
        ("fp8-blocks", "qwen3-moe"),
        ("compressed-int8", "qwen2-moe"),
        ("mxfp4", "gpt-oss"),
        ("awq", "qwen2-vl"),
        ("gptq-4", "arcee"),
        ("fp8-blocks", "granite4"),
        ("fp8-blocks", "gemma2"),
        ("bitsandbytes-8", "mixtral"),
        ("modelopt-nvfp4", "qwen3-moe"),
        ("compressed-nvfp4", "phi3-fused"),
        ("bitsandbytes-nf4-nested", "phi3-fused"),
        ("bitsandbytes-fp4", "gemma2"),
        ("bitsandbytes-nf4", "falcon"),
        ("fp8-blocks", "lfm2"),
        ("compressed-w4a16", "lfm2-vl"),
        ("compressed-fp8-channel", "lfm2-moe"),
        ("fp8-blocks", "qwen3.5"),
        ("fp8-blocks", "qwen3-next"),
        ("fp8-blocks", "qwen3.5-moe-vision"),
        ("compressed-int8", "qwen3.5-moe"),
        ("bitsandbytes-nf4", "qwen3.5-vision"),
    ],
)
def test_families_that_store_their_projections_otherwise(
    name: str, family: str, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    plain, quantized = write_quantized(name, tmp_path, architecture, **fields)
    expected = PagedModel(plain).logits(TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "family", "ignored"),
    [
        (
            "compressed-w4a16",
            "qwen3.5",
            {"ignore": ["lm_head", "re:.*linear_attn.*", "re:.*mtp.*"]},
        ),
        ("awq", "qwen3.5", {"modules_to_not_convert": ["linear_attn", "mtp"]}),
        ("awq", "qwen3.5-vision", {"modules_to_not_convert": ["linear_attn", "visual"]}),
        ("compressed-nvfp4", "qwen3.5", {"ignore": ["lm_head", "re:.*linear_attn.*"]}),
        (
            "fp8-blocks",
            "qwen3.5",
            {
                "modules_to_not_convert": [
                    f"model.layers.{i}.linear_attn.{part}"
                    for i in (0, 2, 3)
                    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
                ]
            },
        ),
    ],
)
def test_linear_attention_that_stays_floats_gives_the_logits_of_the_weights(
    name: str, family: str, ignored: dict[str, list[str]], tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    plain, quantized = write_quantized(
        name, tmp_path, architecture, floats_in="linear_attn", **fields
    )
    change_config(quantized, quantization_config={**FORMATS[name][0], **ignored})
    expected = PagedModel(plain).logits(TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU")
@pytest.mark.parametrize("name", ["compressed-int8", "compressed-int8-tensor"])
def test_8_bit_integers_stay_what_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "serves", panels.runs)
    plain, quantized = write_quantized(name, tmp_path)
    model = PagedModel(quantized, dtype=torch.bfloat16)
    for layer in model.model.model.layers:
        for product in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            assert isinstance(product, CpuPackedLinear)
            assert product.tensors()["weight"].dtype == torch.uint8
    expected = PagedModel(plain).logits(TOKENS)
    error = (model.logits(TOKENS) - expected).square().mean().sqrt()
    assert error < 0.1 * expected.square().mean().sqrt()


@pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU")
def test_the_steps_of_8_bit_integers_are_multiplied_exactly() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randint(-128, 128, (48, 64), generator=draw).to(torch.int8),
        "weight_scale": torch.rand(48, 1, generator=draw) + 0.5,
    }
    fmt = Int8Channels(per_channel=True, has_input_scale=False)
    # Activations that are whole numbers up to 127 are their own steps.
    x = torch.randint(-127, 128, (5, 64), generator=draw).to(torch.bfloat16)
    x[:, 0] = 127
    out = CpuPackedLinear(fmt.integers(tensors), None, wide=True)(x)
    expected = x.double() @ (tensors["weight"].double() * tensors["weight_scale"].double()).t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-2)


# Formats of integers in groups of a multiple of 32 inputs.
GROUPED = {
    "awq": 4,
    "gptq-4": 4,
    "gptq-8-all": 8,
    "compressed-w4a16": 4,
    "compressed-w8a16-channel": 8,
    "compressed-w8a16-asymmetric-channel": 8,
}
# Of them, those whose middle step is zero.
SYMMETRIC = {"compressed-w4a16", "compressed-w8a16-channel"}


@pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU")
@pytest.mark.parametrize("name", FORMATS)
def test_integers_in_groups_stay_what_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "serves", panels.runs)
    plain, quantized = write_quantized(name, tmp_path)
    model = PagedModel(quantized, dtype=torch.bfloat16)
    expected = PagedModel(plain).logits(TOKENS)
    error = (model.logits(TOKENS) - expected).square().mean().sqrt()
    assert error < 0.1 * expected.square().mean().sqrt()
    is_stored = name.startswith("compressed-int8")
    for layer in model.model.model.layers:
        for product in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            assert isinstance(product, CpuPackedLinear)
            tensors = product.tensors()
            assert (tensors["weight"].dtype == torch.uint8) == (name in GROUPED or is_stored)
            if name in GROUPED:
                num_inputs = 32 // GROUPED[name] * tensors["weight"].shape[1]
                assert num_inputs == (96 if product is layer.mlp.down_proj else 64)
                assert ("offset" in tensors) == (name not in SYMMETRIC)


def test_through_the_engine(tmp_path: Path) -> None:
    plain, quantized = write_quantized("gptq-4", tmp_path, vocab_size=400)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = []
    for folder in (plain, quantized):
        byte_level_tokenizer().save_pretrained(folder)
        llm = LLM(str(folder), dtype="float32", max_model_len=64)
        found = llm.generate([TOKENS[:9], TOKENS[:30]], params, use_tqdm=False)
        outputs.append([output.outputs[0].token_ids for output in found])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unpacking_is_the_inverse_of_packing(bits: int, dim: int) -> None:
    values = torch.randint(0, 2**bits, (16, 24), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(pack_words(values, bits, dim), bits, dim), values.int())


_ASYMMETRIC = compressed("int-quantized", kind="int", bits=8, strategy="channel", symmetric=False)

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "zeros": ("compressed-int8", _ASYMMETRIC, "symmetric: false is not supported with int-quant"),
    "method": ("awq", {"quant_method": "hqq"}, "quant_method: 'hqq' is not supported; supported"),
    "awq bits": ("awq", {"bits": 8}, "bits: 8 is not supported; only 4"),
    "awq layout": ("awq", {"version": "gemv"}, "version: 'gemv'"),
    "awq group": ("awq", {"group_size": 40}, "group_size 40 must divide .* of a weight of 64 x 64"),
    "bitsandbytes storage": (
        "bitsandbytes-nf4",
        {"bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage: 'bfloat16' is not supported",
    ),
    "modelopt": (
        "modelopt-fp8",
        {"quant_algo": "W4A8_AWQ"},
        "quant_algo: 'W4A8_AWQ' is not supported; only FP8 and NVFP4",
    ),
    "gptq bits": ("gptq-4", {"bits": 3}, "bits: 3"),
    "gptq layout": ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
    "gptq modules": ("gptq-4", {"dynamic": {"-:.*": {}}}, "dynamic"),
    "fp8 blocks": ("fp8-blocks", {"activation_scheme": "static"}, "activation_scheme: static"),
    "layout": ("compressed-int8", {"format": "marlin-24"}, "format: 'marlin-24' with int weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    _, quantized = write_quantized(name, tmp_path)
    save_file({}, quantized / "model.safetensors")  # before a weight is read
    change_config(quantized, quantization_config={**FORMATS[name][0], **changes})
    with pytest.raises(UnsupportedError, match=message):
        PagedModel(quantized)


Change = dict[str, torch.Tensor | None]
_PLACE = "model.layers.2.mlp.up_proj"
BROKEN: dict[str, tuple[str, Change, str]] = {
    "no scale": ("awq", {"scales": None}, f"{_PLACE}.scales: missing from model.safetensors"),
    "scale of 0": ("awq", {"scales": torch.zeros(2, 96)}, "scales: a scale is 0"),
    "nan": (
        "fp8-static",
        {"weight_scale": torch.tensor(torch.nan)},
        "weight_scale: a value is not finite",
    ),
    "layout": (
        "bitsandbytes-8",
        {"weight_format": torch.tensor(2, dtype=torch.uint8)},
        f"{_PLACE}.weight_format: must be 0",
    ),
    "shape": (
        "gptq-4",
        {"scales": torch.ones(3, 96)},
        r"has shape \[3, 96\] .* asks for \[2, 96\]",
    ),
    "type": (
        "gptq-4",
        {"qweight": torch.zeros(8, 96)},
        "qweight: has dtype F32 .* asks for int32",
    ),
    "group": (
        "gptq-4",
        {"g_idx": torch.full((64,), 2).int()},
        f"{_PLACE}.g_idx: must be groups from 0 to 1",
    ),
    "another shape": (
        "compressed-w4a16",
        {"weight_shape": torch.tensor([96, 65])},
        f"{_PLACE}.weight_shape: must be",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_named(case: str, tmp_path: Path) -> None:
    name, changes, message = BROKEN[case]
    _, quantized = write_quantized(name, tmp_path)
    stored = load_file(quantized / "model.safetensors")
    for key, tensor in changes.items():
        if tensor is None:
            del stored[f"{_PLACE}.{key}"]
        else:
            stored[f"{_PLACE}.{key}"] = tensor
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        PagedModel(quantized)


def test_a_broken_scale_of_experts_is_named(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["gpt-oss"]
    _, quantized = write_quantized("mxfp4", tmp_path, architecture, **fields)
    stored = load_file(quantized / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][4, 7, 1] = 255
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj\.scales: one is NaN"
    ):
        PagedModel(quantized)
    change_config(quantized, intermediate_size=80)
    with pytest.raises(
        UnsupportedError, match="in_features 80 is not a multiple of the block size 32"
    ):
        PagedModel(quantized)


def test_experts_of_one_layer_are_quantised_all_or_none(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen3-moe"]
    _, quantized = write_quantized("awq", tmp_path, architecture, **fields)
    ignored = {**FORMATS["awq"][0], "modules_to_not_convert": ["layers.1.mlp.experts.2"]}
    change_config(quantized, quantization_config=ignored)
    with pytest.raises(UnsupportedError, match=r"experts\.2\.gate_proj.* one quantisation for all"):
        PagedModel(quantized)


@pytest.mark.parametrize(
    ("family", "param"),
    [
        ("gpt2", "config.json: quantization_config"),
        ("gpt-neox", "config.json: quantization_config"),
        ("granite-moe", "quantization_config"),
    ],
)
def test_what_is_stored_in_another_order_is_refused(
    family: str, param: str, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields)
    change_config(tmp_path, quantization_config=FORMATS["awq"][0])
    with refuses("unsupported", param):
        PagedModel(tmp_path)


def test_the_other_name_of_an_order_by_activations(tmp_path: Path) -> None:
    plain, quantized = write_quantized("compressed-w4a16-actorder", tmp_path)
    order = {"group_size": 16, "actorder": "dynamic"}
    config = compressed("pack-quantized", kind="int", bits=4, strategy="group", **order)
    change_config(quantized, quantization_config=config)
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["awq", "bitsandbytes-nf4"])
def test_a_decoder_that_is_stored_alone(name: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path, tie_word_embeddings=True)
    for folder in (plain, quantized):
        stored = load_file(folder / "model.safetensors")
        alone = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
        save_file(alone, folder / "model.safetensors")
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)
