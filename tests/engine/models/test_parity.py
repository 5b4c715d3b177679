"""Logits are as near to exact ones as transformers', for every architecture and rope scaling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.factories.checkpoints import ARCHITECTURES, ROPES, write_checkpoint
from tests.factories.exact import ExactModel, assert_as_accurate, decoded_logits
from tests.factories.paged_model import PagedModel


def _tokens(count: int, seed: int = 0, vocab_size: int = 160) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


class Reference:
    """Transformers' model in float32, and in float64."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.exact = ExactModel(model)

    def check(
        self, logits: Tensor, token_ids: list[int], num_prompt_tokens: int | None = None
    ) -> None:
        """Assert that `logits` of every position are as accurate as transformers'."""
        assert logits.dtype == torch.float32
        theirs = decoded_logits(self.model, token_ids, num_prompt_tokens)
        assert_as_accurate(logits, theirs, self.exact.logits(token_ids, num_prompt_tokens))


@pytest.fixture(scope="module", params=[(a, r) for a in ARCHITECTURES for r in ROPES], ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PagedModel, Reference]:
    architecture, rope = request.param
    path = tmp_path_factory.mktemp("checkpoint")
    reference = Reference(write_checkpoint(path, architecture, rope=rope))
    return PagedModel(path), reference


def test_single_prefill(pair: tuple[PagedModel, Reference]) -> None:
    model, reference = pair
    for length in (1, 2, 17, 100):
        token_ids = _tokens(length, seed=length)
        reference.check(model.logits(token_ids), token_ids)


def test_chunked_prefill_and_decode(pair: tuple[PagedModel, Reference]) -> None:
    model, reference = pair
    token_ids = _tokens(60)
    reference.check(model.logits(token_ids, [13, 1, 7, 25, 4] + [1] * 10), token_ids)


def test_mixed_batches(pair: tuple[PagedModel, Reference]) -> None:
    """Sequences of all lengths advance by random amounts in shared steps."""
    model, reference = pair
    model_draw = random.Random(3)
    running = [model.start(_tokens(length, seed=length)) for length in (3, 9, 31, 50, 77)]
    while live := [sequence for sequence in running if sequence.remaining]:
        chosen = model_draw.sample(live, model_draw.randint(1, len(live)))
        model.step([(s, min(s.remaining, model_draw.choice((1, 1, 2, 5, 20)))) for s in chosen])
    for sequence in running:
        reference.check(torch.cat(sequence.logits), sequence.token_ids)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dynamic_rope_beyond_the_original_length(architecture: str, tmp_path: Path) -> None:
    """A prompt within the original length, decoded far beyond it, as transformers decodes it."""
    reference = Reference(
        write_checkpoint(tmp_path, architecture, rope="dynamic", max_position_embeddings=24)
    )
    token_ids = _tokens(90)
    model = PagedModel(tmp_path)
    reference.check(model.logits(token_ids, [20] + [1] * 70), token_ids, num_prompt_tokens=20)
    # Where the tokens come from makes no difference: chunks and prefixes can be shared.
    reference.check(model.logits(token_ids, [5, 85]), token_ids, num_prompt_tokens=20)


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2-some-layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-layer-types": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_sliding_window_shorter_than_the_prompt(case: str, tmp_path: Path) -> None:
    architecture, fields = WINDOWED[case]
    reference = Reference(write_checkpoint(tmp_path / "windowed", architecture, **fields))
    full = ExactModel(write_checkpoint(tmp_path / "full", architecture))
    model = PagedModel(tmp_path / "windowed")
    token_ids = _tokens(70)
    assert not torch.allclose(
        reference.exact.logits(token_ids), full.logits(token_ids), rtol=0, atol=0.1
    )
    reference.check(model.logits(token_ids), token_ids)
    reference.check(model.logits(token_ids, [30, 3, 17] + [1] * 20), token_ids)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": None}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 24}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
    ],
    ids=str,
)
def test_variants(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    reference = Reference(write_checkpoint(tmp_path, architecture, **fields))
    token_ids = _tokens(40)
    reference.check(PagedModel(tmp_path).logits(token_ids, [25] + [1] * 15), token_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_is_as_near_to_exact_as_transformers(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = write_checkpoint(tmp_path, architecture, dtype=dtype)
    widened = Reference(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    token_ids = _tokens(80)
    model = PagedModel(tmp_path, dtype=dtype)
    assert model.spec.dtype == str(dtype).removeprefix("torch.")
    exact = widened.exact.logits(token_ids)
    error = (model.logits(token_ids, [50] + [1] * 30) - exact).square().mean().sqrt()
    their_error = (decoded_logits(theirs, token_ids) - exact).square().mean().sqrt()
    # The same operations are rounded; over 12,800 logits the order of sums makes no difference.
    assert error < 1.2 * their_error
    # In float32 the weights of the same checkpoint are widened, not rounded.
    widened.check(PagedModel(tmp_path).logits(token_ids), token_ids)
