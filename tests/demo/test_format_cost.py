"""The command that says how large each format is: what it writes, and what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.demo import CHECKPOINT_DIR
from engine.models.build import build_model
from engine.models.registry import read_model_spec
from engine.quantization.linear import QuantizedLinear
from engine.quantization.registry import read_quantization
from engine.weights import load_weights
from tests.demo.encoders import ENCODERS
from tests.demo.format_cost import measure, write_format
from tests.demo.logit_error import load_on_cpu
from tests.factories.forms import quantizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name, named in ENCODERS.items() if named.config])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    named = ENCODERS[name]
    write_format(CHECKPOINT_DIR, named, tmp_path / "written")
    spec = read_model_spec(tmp_path / "written")
    stored = read_quantization(tmp_path / "written")
    model = build_model(
        spec, max_model_len=16, dtype=torch.float32, device=CPU, quantization=stored
    )
    load_weights(model, tmp_path / "written")
    plain = load_on_cpu(CHECKPOINT_DIR, torch.float32)
    for layer, original in zip(model.model.layers, plain.model.layers, strict=True):
        found, wanted = layer.mlp.down_proj, original.mlp.down_proj  # type: ignore[union-attr]
        assert isinstance(found, QuantizedLinear)
        expected = named.encode(wanted.weight).decoded()  # type: ignore[union-attr, operator]
        assert torch.equal(found.dequantized().weight, expected)


@pytest.mark.skipif(
    not quantizes(torch.bfloat16, "int4"), reason="our kernels are not for this CPU"
)
@pytest.mark.parametrize("setting", ["int4", None])
def test_measuring(setting: str | None) -> None:
    found = measure(str(CHECKPOINT_DIR), {"quantization": setting})
    assert found["product"] == ("floats" if setting is None else "integers")
    assert 0 < found["seconds"] < 60
    assert found["memory"] <= found["peak"]
