"""A checkpoint converted to GGUF, read back."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from client.bench.servers.gguf import TYPES, convert
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

VOCAB = 400


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(
        tmp_path,
        "Qwen2ForCausalLM",
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    return tmp_path


@pytest.mark.parametrize(("kind", "error"), [("bf16", 2**-8), ("q8_0", 0.01), ("q4_0", 0.15)])
def test_the_weights_and_what_they_are_for(checkpoint: Path, kind: str, error: float) -> None:
    out = checkpoint / "model.gguf"
    convert(checkpoint, out, kind)
    reader = gguf.GGUFReader(out)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen2"
    assert fields["general.file_type"] == TYPES[kind]
    assert (fields["qwen2.block_count"], fields["qwen2.attention.head_count_kv"]) == (3, 2)
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == VOCAB
    assert len(set(fields["tokenizer.ggml.tokens"])) == VOCAB
    assert len(fields["tokenizer.ggml.token_type"]) == VOCAB

    found = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    weights = load_file(checkpoint / "model.safetensors")
    assert len(found) == len(weights)
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.2.mlp.down_proj.weight", "blk.2.ffn_down.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
    ):
        wanted = weights[ours]
        assert found[theirs].shape == wanted.shape
        assert np.abs(found[theirs] - wanted).max() <= error * np.abs(wanted).max()
    bias = "model.layers.0.self_attn.k_proj.bias"
    assert np.array_equal(found["blk.0.attn_k.bias"], weights[bias])


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="must be a Qwen2"):
        convert(tmp_path, tmp_path / "model.gguf", "bf16")
