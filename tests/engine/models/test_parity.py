"""Logits equal transformers' in float32, for every architecture and rope scaling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.factories.checkpoints import ARCHITECTURES, ROPES, write_checkpoint
from tests.factories.paged_model import PagedModel

TOLERANCE = 1e-4


def _tokens(count: int, seed: int = 0, vocab_size: int = 160) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


@torch.inference_mode()
def _reference(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0]


def _assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=[(a, r) for a in ARCHITECTURES for r in ROPES], ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PagedModel, PreTrainedModel]:
    architecture, rope = request.param
    path = tmp_path_factory.mktemp("checkpoint")
    reference = write_checkpoint(path, architecture, rope=rope)
    return PagedModel(path), reference


def test_single_prefill(pair: tuple[PagedModel, PreTrainedModel]) -> None:
    model, reference = pair
    for length in (1, 2, 17, 100):
        token_ids = _tokens(length, seed=length)
        _assert_close(model.logits(token_ids), _reference(reference, token_ids))


def test_chunked_prefill_and_decode(pair: tuple[PagedModel, PreTrainedModel]) -> None:
    model, reference = pair
    token_ids = _tokens(60)
    expected = _reference(reference, token_ids)
    _assert_close(model.logits(token_ids, [13, 1, 7, 25, 4] + [1] * 10), expected)


def test_mixed_batches(pair: tuple[PagedModel, PreTrainedModel]) -> None:
    """Sequences of all lengths advance by random amounts in shared steps."""
    model, reference = pair
    model_draw = random.Random(3)
    running = [model.start(_tokens(length, seed=length)) for length in (3, 9, 31, 50, 77)]
    expected = [_reference(reference, sequence.token_ids) for sequence in running]
    while live := [sequence for sequence in running if sequence.remaining]:
        chosen = model_draw.sample(live, model_draw.randint(1, len(live)))
        model.step([(s, min(s.remaining, model_draw.choice((1, 1, 2, 5, 20)))) for s in chosen])
    for sequence, logits in zip(running, expected, strict=True):
        _assert_close(torch.cat(sequence.logits), logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dynamic_rope_beyond_the_original_length(architecture: str, tmp_path: Path) -> None:
    """A prompt within the original length, decoded far beyond it, as transformers decodes it."""
    reference = write_checkpoint(tmp_path, architecture, rope="dynamic", max_position_embeddings=24)
    token_ids = _tokens(90)
    expected = []
    with torch.inference_mode():
        cache, new = None, token_ids[:20]
        for token in [*token_ids[20:], None]:
            out = reference(torch.tensor([new]), past_key_values=cache, use_cache=True)
            expected.append(out.logits[0])
            cache, new = out.past_key_values, [token]
    model = PagedModel(tmp_path)
    _assert_close(model.logits(token_ids, [20] + [1] * 70), torch.cat(expected))
    # Where the tokens come from makes no difference: chunks and prefixes can be shared.
    _assert_close(model.logits(token_ids, [5, 85]), torch.cat(expected))


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
    reference = write_checkpoint(tmp_path / "windowed", architecture, **fields)
    full = write_checkpoint(tmp_path / "full", architecture)
    model = PagedModel(tmp_path / "windowed")
    token_ids = _tokens(70)
    expected = _reference(reference, token_ids)
    assert not torch.allclose(expected, _reference(full, token_ids), atol=0.1)
    _assert_close(model.logits(token_ids), expected)
    _assert_close(model.logits(token_ids, [30, 3, 17] + [1] * 20), expected)


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
    reference = write_checkpoint(tmp_path, architecture, **fields)
    token_ids = _tokens(40)
    logits = PagedModel(tmp_path).logits(token_ids, [25] + [1] * 15)
    _assert_close(logits, _reference(reference, token_ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_is_as_near_to_exact_as_transformers(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = write_checkpoint(tmp_path, architecture, dtype=dtype)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids = _tokens(80)
    expected = _reference(exact, token_ids)
    model = PagedModel(tmp_path, dtype=dtype)
    assert model.config.dtype == str(dtype).removeprefix("torch.")
    error = (model.logits(token_ids, [50] + [1] * 30) - expected).square().mean().sqrt()
    their_error = (_reference(theirs, token_ids).float() - expected).square().mean().sqrt()
    assert error < 1.2 * their_error
    # The same checkpoint computed in float32 is exact: the weights are widened, not rounded.
    _assert_close(PagedModel(tmp_path).logits(token_ids), expected)
