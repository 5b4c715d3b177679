"""Which GEMM serves on a CPU follows from the time that each takes; the times are simulated."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import multiplies_int8
from engine.layers.linear.linear import Gated
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from engine.models import process_weights
from engine.models.process_weights import (
    Shape,
    WeightProcessor,
    can_choose,
    measure_gemms,
    projection_shapes,
)
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import in_panels
from tests.factories.paged_model import PagedModel

pytestmark = pytest.mark.skipif(
    not (in_panels(torch.bfloat16) and can_pack(torch.bfloat16)),
    reason="needs the bfloat16 GEMM of both backends: trident's kernels and oneDNN",
)

SHAPES = Counter({Shape(192, 64, None): 3, Shape(256, 64, "silu"): 2})


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("factor", "own_gemm"), [(2.0, True), (1.0, True), (0.97, True), (0.9, False), (0.3, False)]
)
def test_gemm_choice_takes_the_faster_backend(
    factor: float, own_gemm: bool, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if int8 and not multiplies_int8():
        pytest.skip("oneDNN has no exact product of 8-bit integers on this CPU")
    timed = []

    def least_seconds(product: nn.Module, x: Tensor) -> float:
        timed.append((type(product), len(product(x))))
        return len(x) * (1.0 if isinstance(product, CpuPackedLinear) else factor)

    monkeypatch.setattr(process_weights, "_least_seconds", least_seconds)
    choice = measure_gemms(SHAPES, torch.bfloat16, int8=int8)
    assert choice.own_gemm is own_gemm
    assert choice.speed == pytest.approx(dict.fromkeys((1, 4, 16, 64, 512), factor))
    assert f"{factor:.2f}x at 512" in choice.summary()
    assert {kind for kind, _ in timed} >= {CpuPackedLinear, Gated}
    assert {rows for _, rows in timed} == {1, 4, 16, 64, 512}


def test_products_are_timed_for_real() -> None:
    choice = measure_gemms(SHAPES, torch.bfloat16, int8=False)
    assert all(speed > 0 for speed in choice.speed.values())


def test_small_models_and_other_dtypes_have_no_choice() -> None:
    large = Counter({Shape(4096, 4096, None): 2})
    assert can_choose(large, torch.bfloat16, int8=False)
    assert not can_choose(SHAPES, torch.bfloat16, int8=False)
    assert not can_choose(large, torch.float32, int8=False)
    assert not can_choose(Counter({Shape(4096, 4099, None): 2}), torch.bfloat16, int8=False)
    assert not can_choose(Counter({Shape(4100, 4096, "silu"): 2}), torch.bfloat16, int8=False)


def test_weight_processor_without_own_gemm_puts_onednn_in(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Qwen2ForCausalLM")
    model = PagedModel(tmp_path, dtype=torch.bfloat16).model
    shapes = projection_shapes(model)
    assert sum(shapes.values()) == 4 * len(model.model.layers) + 1
    WeightProcessor(model, None, own_gemm=False).finish()
    assert model.model.fused is None
    methods = [type(module) for module in model.modules()]
    assert methods.count(OneDnnLinear) == sum(shapes.values())
    assert CpuPackedLinear not in methods
