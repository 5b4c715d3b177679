"""The table of the products on a CPU."""

import pytest
import torch

from engine.bench import cpu_gemm
from engine.bench.cpu_gemm import BACKENDS, main, table
from engine.bench.kernels.shapes import TINY
from engine.layers.linear.onednn import can_pack
from tests.factories.forms import in_panels

needs_both = pytest.mark.skipif(
    not (in_panels(torch.bfloat16) and can_pack(torch.bfloat16)),
    reason="needs the bfloat16 GEMM of both backends: trident's kernels and oneDNN",
)


def test_rates_and_ratios() -> None:
    rates = dict(zip(BACKENDS, (6e9, 2e9, 3e9, 12e9, 5e9), strict=True))
    lines = table(TINY, {name: {1024: rate} for name, rate in rates.items()}).splitlines()
    cells = [cell.strip() for cell in lines[-1].split("|")[1:-1]]
    assert cells == ["1,024", "6", "2", "3", "12", "5", "2.00", "2.00"]


@needs_both
def test_all_backends_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = 2 * TINY.layer_parameters // TINY.layers
    monkeypatch.setattr(cpu_gemm, "_WEIGHT_BYTES", 3 * flops)
    monkeypatch.setattr(cpu_gemm, "_LEAST_S", 0.02)
    main(["--models", "tiny", "--rows", "100,1"])
    lines = capsys.readouterr().out.splitlines()
    assert all(name in lines[3] for name in BACKENDS)
    assert [line.split()[1] for line in lines[5:]] == ["100", "1"]


def test_a_cpu_without_both_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemm, "can_pack", lambda dtype: False)
    with pytest.raises(SystemExit):
        main(["--models", "tiny"])
    assert "needs the bfloat16 GEMM of both backends" in capsys.readouterr().err
