"""The table and the plot of the products on a CPU."""

from pathlib import Path

import pytest
import torch

from engine.bench import cpu_products
from engine.bench.cpu_products import FORMS, flops, main, table
from engine.bench.shapes import QWEN_0_5B, TINY
from engine.layers.packed_linear import can_pack
from tests.factories.forms import in_panels

needs_both = pytest.mark.skipif(
    not (in_panels(torch.bfloat16) and can_pack(torch.bfloat16)),
    reason="this CPU has not both products of ours and of oneDNN in bfloat16",
)


def test_a_layers_operations_are_those_of_its_weights() -> None:
    assert flops(QWEN_0_5B) * QWEN_0_5B.layers == 2 * QWEN_0_5B.layer_parameters


def test_rates_and_ratios() -> None:
    seconds = {
        "ours bf16": 2.0,
        "F.linear bf16": 8.0,
        "oneDNN bf16, packed": 3.0,
        "ours int8": 1.0,
        "oneDNN int8": 4.0,
    }
    times = {name: {4: taken * flops(TINY)} for name, taken in seconds.items()}
    _, row = table(TINY, times)
    assert row.split() == ["4", *["0"] * 5, "1.50", "2.00"]


@needs_both
def test_all_forms_are_measured_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "_WEIGHT_BYTES", 3 * flops(TINY))
    plot = tmp_path / "products.png"
    main(["--models", "tiny", "--rows", "100,1", "--plot", str(plot)])
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert all(name in head for name in FORMS)
    assert [row.split()[0] for row in rows] == ["1", "100"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_cpu_without_both_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "can_pack", lambda dtype: False)
    with pytest.raises(SystemExit):
        main(["--models", "tiny"])
    assert "not both products" in capsys.readouterr().err
