"""Logits of any vocabulary: float32 out of the product, and aligned on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.devices import require_full_precision
from engine.layers.vocabulary import Embedding, LMHead
from tests.factories.checkpoints import write_checkpoint
from tests.factories.paged_model import PagedModel

CPU, META = torch.device("cpu"), torch.device("meta")
HALVES = (torch.bfloat16, torch.float16)
VOCABS = (1, 63, 64, 100, 50257)  # the last is GPT-2's
HIDDEN = 32


class _Operations(TorchDispatchMode):
    """Records the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.found.append((func.overloadpacket.__name__, out.dtype, tuple(out.shape)))
        return out


def logits_of(kind: str, vocab: int, hidden: Tensor) -> Tensor:
    layer: Embedding | LMHead
    if kind == "tied":
        layer = Embedding(vocab, HIDDEN, dtype=hidden.dtype, device=hidden.device)
        return layer.logits(hidden)
    layer = LMHead(vocab, HIDDEN, dtype=hidden.dtype, device=hidden.device)
    found: Tensor = layer(hidden)
    return found


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_on_a_gpu_one_aligned_product_gives_float32(
    kind: str, dtype: torch.dtype, vocab: int
) -> None:
    """On the meta device, which runs what a GPU runs."""
    hidden = torch.empty(5, HIDDEN, dtype=dtype, device=META)
    allocations = ("empty", "zero_")
    with torch.inference_mode(), _Operations() as operations:
        logits = logits_of(kind, vocab, hidden)
    (product,) = [each for each in operations.found if each[0] not in allocations]
    name, product_dtype, (rows, columns) = product
    assert (name, product_dtype, rows) == ("mm", torch.float32, 5), "rounded to another type first"
    assert columns % 64 == 0
    assert vocab <= columns < vocab + 64
    assert tuple(logits.shape) == (5, vocab)
    assert logits.stride() == (columns, 1)


@pytest.mark.parametrize("vocab", VOCABS[:4])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_padding_is_never_seen(kind: str, vocab: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, HIDDEN), torch.randn(vocab, HIDDEN)
    make = Embedding if kind == "tied" else LMHead
    layer = make(vocab, HIDDEN, dtype=torch.float32, device=CPU)
    layer.rows.copy_(weight)
    assert not layer.weight[vocab:].any()
    logits = layer.logits(hidden) if isinstance(layer, Embedding) else layer(hidden)
    torch.testing.assert_close(logits, hidden @ weight.t())


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_with_an_odd_vocabulary_is_loaded_into_padded_weights(
    tmp_path: Path, tied: bool
) -> None:
    theirs = write_checkpoint(tmp_path, vocab_size=157, tie_word_embeddings=tied)
    model = PagedModel(tmp_path).model
    embedding = model.model.embed_tokens
    assert torch.equal(embedding.rows, theirs.get_input_embeddings().weight)
    assert len(embedding.weight) == 192
    token_ids = torch.tensor([list(range(100, 157))])
    with torch.inference_mode():
        wanted = theirs(token_ids).logits[0]
    torch.testing.assert_close(
        PagedModel(tmp_path).logits(token_ids[0].tolist()), wanted, rtol=1e-4, atol=1e-3
    )


def test_torch_is_told_to_round_nothing_before_the_end() -> None:
    products = torch.backends.cuda.matmul
    names = (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
        "allow_tf32",
    )
    before = {name: getattr(products, name) for name in names}
    try:
        for name in names:
            setattr(products, name, True)
        require_full_precision()
        assert not any(getattr(products, name) for name in names)
    finally:
        for name, value in before.items():
            setattr(products, name, value)
