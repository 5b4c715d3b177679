"""The command that says what each format costs: its encoders, and its table."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from engine.demo import CHECKPOINT_DIR
from tests.demo.batches import batches
from tests.demo.encoders import ENCODERS
from tests.demo.format_error import format_error, loading_error, show
from tests.factories.forms import quantizes

Text = list[tuple[Tensor, Tensor]]

# RMS errors of normal weights in 8, 5 and 4 bits; FP8 has 3 bits of fraction.
BOUNDS = {"8": (0.004, 0.013), "F": (0.02, 0.03), "5": (0.03, 0.045), "4": (0.07, 0.12)}


def _kind(name: str) -> str:
    if name.startswith("FP8"):
        return "F"
    return next(digit for digit in name if digit in "854")


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_are_rounded_to_the_nearest(name: str) -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    fmt, tensors = encoded = ENCODERS[name].encode(weight)
    for key, stored in fmt.tensors(96, 256).items():
        if key.startswith("weight.quant_state"):
            continue
        assert tensors[key].shape == stored.shape
        assert tensors[key].dtype == stored.dtype
    error = ((encoded.decoded() - weight).norm() / weight.norm()).item()
    least, most = BOUNDS[_kind(name)]
    assert least < error < most


@pytest.fixture(scope="module")
def text() -> Text:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    return [(ids[:4, :125], labels[:4, :125]) for ids, labels in islice(batches(tokenizer, 3), 1)]


@pytest.mark.parametrize(
    "name", ["NF4", "FP8 per block of 128", "Q4_0", "int8 per channel (compressed-tensors)"]
)
def test_formats(name: str, text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    error = format_error(CHECKPOINT_DIR, ENCODERS[name].encode, text)
    # Activations and sums in bfloat16, or integers with the activations in 8 bits.
    assert 0.001 < error.added.relative_error < (0.008 if error.product == "floats" else 0.04)
    assert error.added.agreement > 0.98
    assert error.whole.agreement > 0.95
    is_in_8_bits = name.startswith("int8")
    assert (error.whole.relative_error < 1.5 * error.added.relative_error) == is_in_8_bits
    assert error.whole.perplexity_ratio == pytest.approx(1, abs=0.03)
    show({name: error})
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith(f"| {name} | {error.product} | {error.added.relative_error:.2%} | x ")
    assert f"{error.whole.agreement:.1%} |" in row


@pytest.mark.skipif(
    not quantizes(torch.bfloat16, "int4"), reason="our kernels are not for this CPU"
)
def test_quantisation_while_loading(text: Text) -> None:
    plain = loading_error(CHECKPOINT_DIR, None, text)
    assert plain.added == plain.whole
    assert plain.added.relative_error < 0.008
    int4 = loading_error(CHECKPOINT_DIR, "int4", text)
    assert int4.product == "integers"
    # The reference has the same steps, of weights and of the head.
    assert int4.added.relative_error < 0.02 < 0.04 < int4.whole.relative_error < 0.12
    assert int4.whole.agreement > 0.97
