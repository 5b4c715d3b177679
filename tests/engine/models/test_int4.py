"""`quantization: int4`: 4 bits in groups of 32 inputs, from float weights, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from engine import LLM
from engine.config.setting_types import Quantization
from engine.layers.integer_weight import quantize_groups
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import quantize_channels
from engine.layers.linear.linear import Linear
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import WeightProcessor
from engine.weights import fill_with_random_weights, load_weights, loader
from kernels.cpu import linear as panels
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.families import FAMILIES
from tests.factories.forms import runs_panels
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import write_quantized

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU"
)

TOKENS = [(7 * i + i // 3) % 160 for i in range(90)]
GROUP = panels.GROUP


@pytest.fixture(autouse=True)
def our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have our products serve where oneDNN's are faster, too."""
    monkeypatch.setattr(panels, "serves", panels.runs)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.isfinite().all()
    return ((found - wanted).norm() / wanted.norm()).item()


def in_groups(weight: Tensor) -> Tensor:
    """Return what 4 bits stand for."""
    steps, scale, offset, _ = quantize_groups(weight, GROUP)
    wide = scale.repeat_interleave(GROUP, 1), offset.repeat_interleave(GROUP, 1)
    return torch.addcmul(wide[1], steps.float(), wide[0])


def in_channels(weight: Tensor) -> Tensor:
    steps, scale = quantize_channels(weight)
    return steps * scale[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_groups_have_a_smaller_error_than_those_of_llama_cpp(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 512, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    found = relative_error(in_groups(weight), weight.float())
    assert found == pytest.approx(0.074, abs=0.001)
    values = weight.float().numpy()
    for name in ("Q4_0", "Q4_1"):
        kind = gguf.GGMLQuantizationType[name]
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert found < relative_error(torch.from_numpy(theirs), weight.float())


def test_groups_of_one_or_two_values_are_exact() -> None:
    weight = torch.zeros(3, 2 * GROUP)
    weight[1] = -0.75
    weight[2, 5] = 3e4
    torch.testing.assert_close(in_groups(weight), weight, rtol=1e-6, atol=0.01)
    assert torch.equal(in_groups(weight[:2]), weight[:2])


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_model_computes_what_its_weights_stand_for(is_tied: bool, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=is_tied, initializer_range=64**-0.5
    )
    model = PagedModel(tmp_path, dtype=torch.bfloat16)
    WeightProcessor(model.model, "int4").finish()
    found = model.logits(TOKENS, chunks=[40, 1, 3, 46])
    reference = PagedModel(tmp_path)
    original = reference.logits(TOKENS)
    for module in reference.model.model.modules():
        if isinstance(module, Linear):
            module.weight.copy_(in_groups(module.weight.bfloat16()))
    if not is_tied:
        head = reference.model.lm_head
        head.rows.copy_(in_channels(head.rows.bfloat16()))  # type: ignore[union-attr, operator]
    wanted = reference.logits(TOKENS)
    # 4 bits of the weights weigh more than all roundings of activations.
    assert relative_error(found, wanted) < 0.03
    assert 0.1 < relative_error(wanted, original) < 0.4


def test_where_groups_do_not_fit_there_are_8_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, intermediate_size=112)
    model = PagedModel(tmp_path, dtype=torch.bfloat16).model
    WeightProcessor(model, "int4").finish()
    for layer in model.model.layers:
        for name, depth in (("gate_up_proj", 8), ("down_proj", 112 // 4)):
            tensors = getattr(layer.mlp, name).tensors()
            assert tensors["weight"].shape[1] == depth
            assert ("offset" in tensors) == (name == "gate_up_proj")
    assert "offset" not in model.lm_head.tensors()  # type: ignore[union-attr, operator]


def test_experts_have_8_bits(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["mixtral"]
    write_checkpoint(tmp_path, architecture, **fields)
    made: dict[Quantization, nn.Module] = {}
    for quantization in ("int8", "int4"):
        model = PagedModel(tmp_path, dtype=torch.bfloat16)
        WeightProcessor(model.model, quantization).finish()
        assert model.logits(TOKENS).isfinite().all()
        made[quantization] = model.model.model.layers[0].mlp
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(made["int4"](x), made["int8"](x))


@pytest.mark.parametrize(("name", "is_kept"), [("awq", True), ("gptq-8-all", False)])
def test_4_bits_of_a_checkpoint_stay(name: str, is_kept: bool, tmp_path: Path) -> None:
    _, quantized = write_quantized(name, tmp_path)
    found, plain = (
        PagedModel(quantized, dtype=torch.bfloat16, quantization=quantization)
        for quantization in ("int4", None)
    )
    tensors, stored = (
        model.model.model.layers[0].mlp.down_proj.tensors() for model in (found, plain)
    )
    assert tensors["scale"].shape[1] == 96 // GROUP
    assert torch.equal(tensors["weight"], stored["weight"]) == is_kept
    assert relative_error(found.logits(TOKENS), plain.logits(TOKENS)) < (0.03 if is_kept else 0.3)


def _check_turns(model: CausalLM, fill: Any) -> None:
    """Check that a layer is converted, and its weights freed, before the next is filled."""
    processor = WeightProcessor(model, "int4")
    weights = [
        [
            StorageWeakRef(module.weight.untyped_storage())
            for module in layer.modules()
            if isinstance(module, Linear)
        ]
        for layer in model.model.layers
    ]
    done: list[nn.Module] = []

    def convert(layer: nn.Module) -> None:
        later = weights[len(done) :]
        assert not any(weight.expired() for layer in later for weight in layer)
        processor.process(layer)
        done.append(layer)
        earlier = weights[: len(done)]
        assert all(weight.expired() for layer in earlier for weight in layer)

    fill(convert)
    assert done == list(model.model.layers)
    processor.finish()
    assert not any(isinstance(module, Linear) for module in model.modules())


def test_layers_are_read_and_converted_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, max_shard_size="50KB")
    expected = PagedModel(tmp_path, dtype=torch.bfloat16)
    WeightProcessor(expected.model, "int4").finish()
    found = PagedModel(tmp_path, dtype=torch.bfloat16)
    for parameter in found.model.parameters():
        parameter.fill_(float("nan"))
    read: list[set[str]] = []
    read_spans = loader.read_spans

    def record(spans: list[Any], *others: Any, **settings: Any) -> None:
        read.append({span.tensor.name for span in spans})
        read_spans(spans, *others, **settings)

    monkeypatch.setattr(loader, "read_spans", record)
    _check_turns(found.model, lambda convert: load_weights(found.model, tmp_path, on_layer=convert))
    assert len(read) == 4
    for i, names in enumerate(read[:3]):
        assert len(names) == 9
        assert all(name.startswith(f"model.layers.{i}.") for name in names)
    assert torch.equal(found.logits(TOKENS), expected.logits(TOKENS))


def test_random_layers_are_filled_and_converted_in_turn(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    expected = PagedModel(tmp_path, dtype=torch.bfloat16)
    fill_with_random_weights(expected.model, 3)
    WeightProcessor(expected.model, "int4").finish()
    found = PagedModel(tmp_path, dtype=torch.bfloat16)
    _check_turns(
        found.model, lambda convert: fill_with_random_weights(found.model, 3, on_layer=convert)
    )
    assert torch.equal(found.logits(TOKENS), expected.logits(TOKENS))


def test_settings_that_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^quantization: .*'int8', 'int4', 'fp8', 'awq', "):
        LLM(str(checkpoint), device="cpu", quantization="int3")
    monkeypatch.undo()
    with refuses("unsupported", "quantization", match="int4 needs a dtype other than"):
        LLM(str(checkpoint), device="cpu", dtype="float32", quantization="int4")


def test_the_panels_of_a_layer_have_4_bits(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), device="cpu", dtype="bfloat16", quantization="int4")
    layer = llm._core._runner.model.model.layers[0]
    assert isinstance(layer.mlp.down_proj, CpuPackedLinear)
    assert layer.mlp.down_proj.tensors()["scale"].dim() == 3
