"""GGUF files compute what the weights that their blocks stand for do."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.gguf.config import make_config
from engine.checkpoint.gguf.reader import TYPES, read_gguf
from engine.checkpoint.hub import resolve_checkpoint
from engine.errors import CheckpointError, UnsupportedError
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.models.registry import read_model_spec
from engine.text.tokenizer import Tokenizer
from kernels.cpu import linear as panels
from tests.factories.forms import runs_panels
from tests.factories.gguf_checkpoints import FAMILIES, TOKENS, logits, write
from tests.factories.paged_model import PagedModel
from tests.factories.tokenizers import (
    CORPUS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trident" / "gguf"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The header of a file, and few tensors."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    path = write(tmp_path, family, "Q8_0", "Q4_K", "Q6_K", "Q5_0", "F16")
    expected = logits(tmp_path / "plain")
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(resolve_checkpoint(str(path))), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "kind",
    [
        *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("F16", "BF16", "F32"),
        *("IQ4_NL", "IQ4_XS", "MXFP4"),
    ],
)
def test_types(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, "llama", kind)
    expected = logits(tmp_path / "plain")
    torch.testing.assert_close(logits(resolve_checkpoint(str(path))), expected, rtol=0, atol=2e-3)


@pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU")
@pytest.mark.parametrize(
    "kinds",
    [*(("Q4_0",), ("Q8_0",), ("Q4_K",), ("Q5_K",), ("Q6_K",)), ("Q4_K", "Q6_K", "Q8_0", "Q4_0")],
    ids=",".join,
)
@pytest.mark.parametrize("family", ["llama", "llama-biases", "llama-tied"])
def test_products_of_the_integers(
    family: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "serves", panels.runs)
    path = write(tmp_path, family, *kinds)
    model = PagedModel(resolve_checkpoint(str(path)), dtype=torch.bfloat16)
    head = model.model.lm_head or model.model.model.embed_tokens.head
    assert isinstance(head, CpuPackedLinear)
    assert head.tensors()["weight"].dtype == torch.uint8
    for layer in model.model.model.layers:
        for product in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            assert isinstance(product, CpuPackedLinear)
            assert product.tensors()["weight"].dtype == torch.uint8
    expected = logits(tmp_path / "plain")
    error = (model.logits(TOKENS) - expected).square().mean().sqrt()
    assert error < 0.1 * expected.square().mean().sqrt()


def test_the_sizes_of_the_types() -> None:
    for number, (name, *size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == tuple(size)


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_the_tokenizer(make: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "llama", "Q8_0", tokenizer=make())
    ours = Tokenizer.from_pretrained(resolve_checkpoint(str(path)))
    theirs = Tokenizer.from_pretrained(tmp_path / "plain")
    texts = (*CORPUS, "the stop", "<|user|>hello<|end|> é", "two  spaces", "日本 <tool call>x")
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text
        ids = theirs.encode(text)
        assert ours.hf_tokenizer.decode(ids) == theirs.hf_tokenizer.decode(ids)
    assert ours.added_token_ids == theirs.added_token_ids
    assert ours.special_ids == theirs.special_ids
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.chat_template_text == theirs.chat_template_text


@pytest.mark.parametrize(
    ("pre", "says", "has_bos"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False)],
)
def test_the_token_that_begins_a_prompt(
    pre: str, says: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    changes = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.pre": pre}
    if says is not None:
        changes["tokenizer.ggml.add_bos_token"] = says
    path = write(tmp_path, "llama", "Q8_0", **changes)
    tokenizer = Tokenizer.from_pretrained(resolve_checkpoint(str(path)))
    plain = Tokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer.encode("the") == [1] * has_bos + plain.encode("the")
    model = json.loads(tokenizer.to_json())["model"]
    assert bool(model["ignore_merges"]) == (pre == "llama-bpe")


def test_the_folder_is_made_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "llama", "Q8_0")
    folder = resolve_checkpoint(str(path))
    assert folder.parent == cache
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve_checkpoint(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    os.utime(path)  # another file
    assert resolve_checkpoint(str(path)) != folder
    monkeypatch.setattr("engine.checkpoint.gguf.folder._readers", lambda: "others")
    resolve_checkpoint(str(path))
    assert len(list(cache.iterdir())) == 3


def test_without_a_place_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "llama", "Q8_0")
    taken = tmp_path / "taken"
    taken.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert (resolve_checkpoint(str(path)) / "tokenizer.json").is_file()
    monkeypatch.setattr("tempfile.tempdir", str(taken))
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        resolve_checkpoint(str(path))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture: 'mamba' is not supported"),
        ({"llama.expert_count": 8}, "llama: expert_used_count: is missing"),
        ({"split.count": 3, "split.no": 0}, r"split\.count: the file name "),
        (
            {"split.count": 3, "split.no": 1},
            r"split\.no: the file is a shard of 3; pass the first shard",
        ),
        ({"llama.block_count": None}, "llama: block_count: is missing"),
        ({"llama.block_count": 2}, r"blk\.2\.\S+: is not a tensor of this"),
        ({"llama.block_count": 4}, r"blk\.3\.attn_q\.weight: missing"),
        ({"llama.embedding_length": 128}, r"output\.weight: has shape \[400, 256\]"),
        ({"llama.feed_forward_length": -1}, "feed_forward_length: must be an integer"),
        ({"llama.attention.value_length": 32}, r"value_length: must equal "),
        ({"llama.rope.scaling.type": "odd"}, "rope.scaling.factor: is missing"),
        ({"tokenizer.ggml.model": "odd"}, "tokenizer cannot be read: .*'odd'"),
        ({"general.alignment": 0}, "general.alignment: must be a positive integer"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id: must be a token id below 400"),
    ],
)
def test_fields_that_are_wrong(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, "llama", "Q8_0", **changes)
    with pytest.raises((CheckpointError, UnsupportedError), match=problem):
        PagedModel(resolve_checkpoint(str(path)))


@pytest.mark.parametrize(
    "older", [{}, {"llama.rope.scaling.factor": None, "llama.rope.scale_linear": 2.5}]
)
def test_a_scaling_without_a_type_is_linear(older: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, "llama-linear", "Q8_0", **{"llama.rope.scaling.type": None, **older})
    expected = logits(tmp_path / "plain")
    torch.testing.assert_close(logits(resolve_checkpoint(str(path))), expected, rtol=0, atol=2e-3)


def test_gemma_2_without_its_soft_caps(tmp_path: Path) -> None:
    names = ("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping")
    path = write(tmp_path, "gemma2", "Q8_0", **dict.fromkeys(names))
    spec = read_model_spec(resolve_checkpoint(str(path)))
    assert (spec.layers[0].attention.soft_cap, spec.logit_soft_cap) == (50.0, 30.0)


def test_a_file_in_parts(tmp_path: Path) -> None:
    """The first of them, as others may be, is a link: so they lie in the hub's cache."""
    write(tmp_path, "llama", "Q8_0", "Q4_K", tensors_per_file=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [
        f"model-small-{i:05d}-of-{len(parts):05d}.gguf" for i in range(1, len(parts) + 1)
    ]
    assert len(parts) > 2
    for i, part in enumerate(parts):
        part.rename(tmp_path / f"blob{i}")
        part.symlink_to(f"blob{i}")
    expected = logits(tmp_path / "plain")
    folder = resolve_checkpoint(str(parts[0]))
    torch.testing.assert_close(logits(folder), expected, rtol=0, atol=2e-3)
    with pytest.raises(CheckpointError, match=r"split\.no: the file is a shard of \d; pass"):
        resolve_checkpoint(str(parts[1]))
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[2].name}: not found; {parts[0].name}"):
        logits(folder)


@pytest.mark.parametrize("end", [0, 3, 4, 20, 200, 4000, -1000, -1])
def test_a_truncated_file(end: int, tmp_path: Path) -> None:
    path = write(tmp_path, "llama", "Q8_0")
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(
        CheckpointError,
        match=r"model-small\.gguf: is (truncated: it ends before \w|not a GGUF file)",
    ):
        resolve_checkpoint(str(path))


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", "Q8_0")
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = b"\xff\x7f"  # NaN in float16
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight: a scale is not finite"):
        PagedModel(resolve_checkpoint(str(path)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_header_with_wrong_bytes_is_an_error(small: bytes, data: st.DataObject) -> None:
    content = bytearray(small)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        with suppress(CheckpointError, UnsupportedError):
            make_config(read_gguf(Path(file.name)))
