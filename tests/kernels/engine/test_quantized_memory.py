"""What quantised weights take on a GPU is known before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")
pytest.importorskip("gguf", reason="the engine is not installed here")

import gguf
import numpy as np

from engine.models.linear_methods import LinearMethods
from engine.quantization.experts import QuantizedExperts
from engine.quantization.gguf import GgufBlocks
from engine.quantization.linear import QuantizedLinear
from tests.factories.families import FAMILIES
from tests.factories.gguf_files import random_blocks
from tests.factories.quantized import FORMATS
from tests.kernels.engine.test_quantized_experts import load, write
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
# Scales of groups may be float32, but are float16 in checkpoints: 2 bytes beside 16 of 4 bits, or
# beside 8 in groups of 16.
MOST = 1.13
MOST_OF_16 = 1.23
OF_16 = {"gptq-v2-desc-act", "compressed-w4a16-asymmetric", "compressed-w4a16-actorder"}


def tensors_of(part: object) -> Iterator[Tensor]:
    """Yield the tensors that a form keeps, but for biases."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (torch.nn.Module, dict)):
        for name, value in (vars(part) if isinstance(part, torch.nn.Module) else part).items():
            if "bias" not in name:
                yield from tensors_of(value)
    elif isinstance(part, tuple):
        for value in part:
            yield from tensors_of(value)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "mixtral") for name in FORMATS if not name.startswith("bitsandbytes-")),
        *((name, "qwen2") for name in FORMATS if name.startswith("bitsandbytes-")),
        ("mxfp4", "gpt-oss"),
    ],
)
def test_linear_methods_take_the_bytes_that_were_planned(
    name: str, family: str, tmp_path: Path
) -> None:
    assert family in FAMILIES
    _, folder = write(name, family, tmp_path, **SIZES)
    model = load(folder, torch.float16)
    methods = LinearMethods(DEVICE, None, False, own_gemm=True)
    found = 0
    for module in model.modules():
        if not isinstance(module, (QuantizedLinear, QuantizedExperts)):
            continue
        expected = methods.num_bytes(module)
        method = methods.of_stored(module)
        if method is None:
            continue
        found += 1
        kept = {each.data_ptr(): each.untyped_storage().nbytes() for each in tensors_of(method)}
        taken = sum(kept.values())
        most = MOST_OF_16 if name in OF_16 else MOST
        assert taken <= expected <= most * taken
    assert found > 0 or name == "fp8-blocks"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"])
def test_what_blocks_of_gguf_take(kind: str) -> None:
    name = gguf.GGMLQuantizationType[kind]
    blocks = torch.from_numpy(random_blocks((64, 512), name, np.random.default_rng(0)))
    fmt = GgufBlocks(kind)
    weight = fmt.for_gpu({"weight": blocks.to(DEVICE)})
    assert weight is not None
    taken = sum(t.nbytes for t in weight.packed() if isinstance(t, Tensor))
    assert taken <= fmt.num_bytes_on_gpu(64, 512) <= MOST_OF_16 * taken
