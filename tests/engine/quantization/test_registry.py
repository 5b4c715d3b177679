"""What a checkpoint's configuration says of its quantisation as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.setting_types import QuantizationSetting
from engine.errors import UnsupportedError
from engine.offline.llm import LLM
from engine.quantization.registry import read_quantization, while_loading
from engine.request.sampling_params import SamplingParams
from tests.factories.errors import refuses
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import FORMATS, change_config, write_quantized

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]


@pytest.mark.parametrize("field", ["ignore", "ignored_layers"])
def test_modules_that_are_left_out_are_plain(field: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized("compressed-int8", tmp_path)
    floats = load_file(plain / "model.safetensors")
    stored = load_file(quantized / "model.safetensors")
    left_out = "model.layers.1.mlp.down_proj"
    del stored[f"{left_out}.weight_scale"]
    stored[f"{left_out}.weight"] = floats[f"{left_out}.weight"]
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = FORMATS["compressed-int8"][0]
    for pattern in (left_out, r"re:.*layers\.1\.mlp\.down_proj$"):
        ignored = {**config, "ignore": [], field: ["lm_head", pattern]}
        change_config(quantized, quantization_config=ignored)
        torch.testing.assert_close(
            PagedModel(quantized).logits(TOKENS),
            PagedModel(plain).logits(TOKENS),
            rtol=0,
            atol=2e-3,
        )
    change_config(
        quantized, quantization_config={**config, "ignore": ["model.layers.0.self_attn.q_proj"]}
    )
    with pytest.raises(UnsupportedError, match=r"q_proj, k_proj, v_proj .*one quantisation"):
        PagedModel(quantized)


def test_the_first_name_of_the_configuration_of_llm_compressor(tmp_path: Path) -> None:
    plain, quantized = write_quantized("compressed-int8", tmp_path)
    config, _ = FORMATS["compressed-int8"]
    change_config(quantized, quantization_config=None, compression_config=config)
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


def test_plain_checkpoints_have_no_quantization(tmp_path: Path) -> None:
    plain, quantized = write_quantized("awq", tmp_path)
    assert read_quantization(plain) is None
    assert read_quantization(quantized) is not None


def test_the_format_that_it_has_may_be_named(tmp_path: Path) -> None:
    plain, quantized = write_quantized("awq", tmp_path)
    asked: QuantizationSetting
    for asked in ("awq", "awq_marlin"):
        assert while_loading(asked, quantized) is None
    for asked in ("int8", "int4"):
        assert while_loading(asked, quantized) == asked
    assert while_loading(None, quantized) is None
    assert while_loading("fp8", plain) == "fp8"
    change_config(quantized, quantization_config={"quant_method": "fp8"})
    assert while_loading("fp8", quantized) is None
    with refuses(
        "unsupported", "quantization", match="gptq does not match .* has the format fp8; "
    ):
        while_loading("gptq", quantized)
    for folder in (plain, None):
        with pytest.raises(
            UnsupportedError, match=r"gguf does not match .* is not quantised; leave it"
        ):
            while_loading("gguf", folder)


def test_an_engine_takes_the_name_of_the_format(tmp_path: Path) -> None:
    _, quantized = write_quantized("awq", tmp_path)
    prompt = {"prompt_token_ids": TOKENS}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"device": "cpu", "tokenizer": "demo"}
    answers = [
        LLM(quantized, quantization=name, **settings).generate(prompt, params, False)
        for name in (None, "awq")
    ]
    assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1
