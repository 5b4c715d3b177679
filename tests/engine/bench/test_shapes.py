"""The shapes are those that were published, and floors follow from them by arithmetic."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.bench import floors
from engine.bench.checkpoint import write_checkpoint
from engine.bench.kernels.shapes import LLAMA_8B, QWEN_0_5B, QWEN_1_5B, SHAPES, TINY, Shape
from engine.models.build import build_model
from engine.models.registry import read_model_spec
from engine.models.tensor_names import LLAMA_NAMES
from engine.text.tokenizer import Tokenizer
from engine.weights.matching import destinations

CEILINGS = {"read": 4300e9, "bf16": 790e12}
# As the models' cards say.
PARAMETERS = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "8b": 8_030_261_248}


@pytest.mark.parametrize("shape", [*SHAPES, TINY], ids=lambda shape: shape.label)
def test_engine_and_transformers_build_models_of_the_shape(shape: Shape, tmp_path: Path) -> None:
    write_checkpoint(shape, tmp_path)
    config = read_model_spec(tmp_path)
    meta = torch.device("meta")
    ours = build_model(config, max_model_len=32, dtype=torch.bfloat16, device=meta)
    with meta:
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    of_ours = [destination.tensor for destination in destinations(ours, LLAMA_NAMES).values()]
    counts = [
        [tensor.numel() for tensor in tensors if tensor.dim() == dim]
        for tensors in (of_ours, list(theirs.parameters()))
        for dim in (1, 2)
    ]
    assert sum(counts[0]) == sum(counts[2])
    assert sum(counts[1]) == sum(counts[3])
    embeddings = shape.head_parameters * (1 if shape.family["tie_word_embeddings"] else 2)
    assert sum(counts[3]) == shape.layer_parameters + embeddings
    assert PARAMETERS.get(shape.label, 0) in (0, sum(counts[2] + counts[3]))
    assert config.kv_bytes_per_token(torch.bfloat16) == shape.kv_bytes_per_token


def test_every_id_of_the_vocabulary_has_a_text_and_words_are_one_token(tmp_path: Path) -> None:
    write_checkpoint(QWEN_0_5B, tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == QWEN_0_5B.vocab
    for token_id in (256, 5000, QWEN_0_5B.vocab - 1):
        text = tokenizer.token_text(token_id)
        assert text[0] == " "
        assert len(text) == 5
        assert tokenizer.encode(f"a{text}") == [*tokenizer.encode("a"), token_id]
    assert all(tokenizer.is_visible(i, False) for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        (LLAMA_8B, {1: 3.52, 16: 3.99, 64: 5.49, 256: 12.85}),
        (QWEN_1_5B, {1: 0.72, 16: 0.83, 64: 1.15, 256: 2.75}),
        (QWEN_0_5B, {1: 0.23, 16: 0.28, 64: 0.42, 256: 1.07}),
    ],
    ids=["8b", "1.5b", "0.5b"],
)
def test_floors_of_decode_steps(shape: Shape, milliseconds: dict[int, float]) -> None:
    for batch, expected in milliseconds.items():
        found = 1e3 * floors.decode_seconds(shape, batch, 1024 * batch, CEILINGS)
        assert found == pytest.approx(expected, abs=0.006)


def test_floors_of_prefills() -> None:
    for lengths, expected in (([8192], 167), ([1024] * 8, 147.5)):
        found = 1e3 * floors.prefill_seconds(LLAMA_8B, lengths, CEILINGS)
        assert found == pytest.approx(expected, abs=0.5)
