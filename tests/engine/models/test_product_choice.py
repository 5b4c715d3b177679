"""Which products serve on a CPU follows from what they take; their times are simulated."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.layers.int8_linear import multiplies_int8
from engine.layers.linear import Gated
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_linear import PanelLinear
from engine.models import product_choice
from engine.models.conversion import Conversion
from engine.models.product_choice import (
    Shape,
    can_choose,
    measure_products,
    projection_shapes,
)
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import in_panels
from tests.factories.paged_model import PagedModel

pytestmark = pytest.mark.skipif(
    not (in_panels(torch.bfloat16) and can_pack(torch.bfloat16)),
    reason="this CPU has not both products of ours and of oneDNN in bfloat16",
)

SHAPES = Counter({Shape(192, 64, None): 3, Shape(256, 64, "silu"): 2})


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("factor", "ours"), [(2.0, True), (1.0, True), (0.97, True), (0.9, False), (0.3, False)]
)
def test_the_faster_products_serve(
    factor: float, ours: bool, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if int8 and not multiplies_int8():
        pytest.skip("oneDNN has no exact product of 8-bit integers on this CPU")
    timed = []

    def least_seconds(product: nn.Module, x: Tensor) -> float:
        timed.append((type(product), len(product(x))))
        return len(x) * (1.0 if isinstance(product, PanelLinear) else factor)

    monkeypatch.setattr(product_choice, "_least_seconds", least_seconds)
    choice = measure_products(SHAPES, torch.bfloat16, int8=int8)
    assert choice.ours is ours
    assert choice.speed == pytest.approx(dict.fromkeys((1, 4, 16, 64, 512), factor))
    assert f"{factor:.2f} at 512" in choice.summary()
    assert {kind for kind, _ in timed} >= {PanelLinear, Gated}
    assert {rows for _, rows in timed} == {1, 4, 16, 64, 512}


def test_products_are_timed_for_real() -> None:
    choice = measure_products(SHAPES, torch.bfloat16, int8=False)
    assert all(speed > 0 for speed in choice.speed.values())


def test_small_models_and_other_dtypes_have_no_choice() -> None:
    large = Counter({Shape(4096, 4096, None): 2})
    assert can_choose(large, torch.bfloat16, int8=False)
    assert not can_choose(SHAPES, torch.bfloat16, int8=False)
    assert not can_choose(large, torch.float32, int8=False)
    assert not can_choose(Counter({Shape(4096, 4099, None): 2}), torch.bfloat16, int8=False)
    assert not can_choose(Counter({Shape(4100, 4096, "silu"): 2}), torch.bfloat16, int8=False)


def test_without_ours_onednns_are_put_in(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Qwen2ForCausalLM")
    model = PagedModel(tmp_path, dtype=torch.bfloat16).model
    shapes = projection_shapes(model)
    assert sum(shapes.values()) == 4 * len(model.model.layers) + 1
    Conversion(model, None, ours=False).finish()
    assert model.model.fused is None
    forms = [type(module) for module in model.modules()]
    assert forms.count(PackedLinear) == sum(shapes.values())
    assert PanelLinear not in forms
