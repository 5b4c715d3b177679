"""A config.json that its tensors do not bear out is refused before memory is taken for either."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.errors import CheckpointError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    write_checkpoint(tmp_path, vocab_size=len(tokenizer))
    return save_tokenizer(tokenizer, tmp_path)


def load(checkpoint: Path, **fields: Any) -> LLM:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return LLM(model=str(checkpoint))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 65}, r"weight: has shape \[\d+, 64\].* config\.json asks for \[\d+, 65\]"),
        ({"hidden_size": 10**7}, r"weight: has shape \[\d+, 64\].* asks for \[\d+, 10000000\]"),
        ({"intermediate_size": 10**9}, r"mlp\.down_proj\.weight: has shape \[64, 96\]"),
        ({"num_hidden_layers": 4096}, r"model\.layers\.3\..*: missing from model\.safetensors"),
        ({"num_attention_heads": 2**20}, r"self_attn\.o_proj\.weight: has shape \[64, 64\]"),
        (
            {"hidden_size": 2**31 - 2, "intermediate_size": 2**31 - 2},
            "tensors that no memory can hold",
        ),
    ],
)
def test_sizes_that_the_tensors_do_not_have(
    fields: dict[str, Any], message: str, checkpoint: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, **fields)


def test_more_positions_than_the_memory_has_room_for(checkpoint: Path) -> None:
    with refuses("insufficient_memory", "max_model_len", match="the rotary tables of 214748"):
        load(checkpoint, max_position_embeddings=2**31 - 1)


def test_more_sequences_than_the_memory_has_room_for(checkpoint: Path) -> None:
    with refuses("insufficient_memory", "max_num_seqs", match="the tables of 10+ seq"):
        LLM(model=str(checkpoint), device="cpu", max_num_seqs=10**9)
