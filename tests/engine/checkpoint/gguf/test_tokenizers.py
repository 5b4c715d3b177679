"""Tokenizers of GGUF files find the tokens that llama.cpp and the published tokenizers find."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import read_gguf
from engine.checkpoint.gguf.tokenizer import write_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.factories.gguf_files import write_vocabulary
from tests.factories.llama_cpp import download
from tests.factories.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_tokenizer,
)

_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def read(folder: Path, file: Path) -> Tokenizer:
    folder.mkdir()
    (folder / GGUF).symlink_to(file)
    write_tokenizer(folder, read_gguf(file))
    return Tokenizer.from_pretrained(folder)


def converted(
    folder: Path, tokenizer: Any, *, architecture: str = "llama", **changes: Any
) -> Tokenizer:
    """Return the tokenizer of a GGUF file that is made of `tokenizer`."""
    plain = folder / "plain"
    plain.mkdir()
    save_tokenizer(tokenizer, plain)
    write_vocabulary(folder / "vocabulary.gguf", plain, architecture, **changes)
    return read(folder / "read", folder / "vocabulary.gguf")


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of llama.cpp's vocabularies, and of what it makes of texts."""
    return download(tmp_path_factory.mktemp("llama_cpp"), "/ggml-vocab-")


@pytest.mark.large
@pytest.mark.parametrize(
    "name",
    [
        *("llama-spm", "phi-3", "llama-bpe", "qwen2", "qwen35"),
        *("deepseek-llm", "deepseek-coder", "refact", "starcoder", "command-r"),
    ],
)
def test_texts_of_llama_cpp(name: str, vocabularies: Path, tmp_path: Path) -> None:
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split(_BETWEEN_TEXTS)
    lines = Path(f"{file}.out").read_text().split("\n")
    tokenizer = read(tmp_path / "read", file)
    for text, line in zip(texts, lines[: len(texts)], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token_id) for token_id in line.split()], text


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        (
            "llama-spm",
            "<s>[INST] Hi [/INST]",
            [1, 518, 25580, 29962, 6324, 518, 29914, 25580, 29962],
        ),
        ("phi-3", "<|user|>\nHi<|end|>\n<|assistant|>\n", [32010, 6324, 32007, 32001]),
    ],
)
def test_chat_prompts(
    name: str, text: str, ids: list[int], vocabularies: Path, tmp_path: Path
) -> None:
    tokenizer = read(tmp_path / "read", vocabularies / f"ggml-vocab-{name}.gguf")
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("has_prefix", [True, False])
def test_spaces_of_sentence_piece(has_prefix: bool, tmp_path: Path) -> None:
    plain = byte_fallback_tokenizer(strip=has_prefix)
    changes: dict[str, Any] = {}
    if not has_prefix:
        plain.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
        changes["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = converted(tmp_path, plain, **changes)
    theirs = Tokenizer.from_pretrained(tmp_path / "plain")
    for text in (
        *("the stop", " the", "   the", " ", "é"),
        *("<s>the stop</s>the", "<s> the </s>  stop", "the</s></s>\n the"),
    ):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids) == theirs.decode(ids)
    the = tokenizer.encode("the", add_special_tokens=False)
    after_special = tokenizer.encode("<s>the", add_special_tokens=False)[1:]
    assert after_special == the
    assert len(the) == (1 if has_prefix else 2)


@pytest.mark.parametrize(("architecture", "strips"), [("phi3", True), ("llama", False)])
def test_spaces_after_special_tokens_of_phi3(
    architecture: str, strips: bool, tmp_path: Path
) -> None:
    plain = byte_fallback_tokenizer()
    plain.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(token, normalized=False) for token in ("<|user|>", "<|endoftext|>")
            ]
        }
    )
    tokenizer = converted(tmp_path, plain, architecture=architecture)
    ids = tokenizer.added_token_ids

    def is_stripped(token: str) -> bool:
        found = tokenizer.encode(f"{token}\nthe", add_special_tokens=False)
        return found == [ids[token], *tokenizer.encode("the", add_special_tokens=False)]

    stripped = {token for token in ids if is_stripped(token)}
    assert stripped == ({"<|user|>", "</s>"} if strips else set())


def test_spaces_after_special_tokens_of_phi4(tmp_path: Path) -> None:
    tokenizer = converted(
        tmp_path,
        byte_level_tokenizer(),
        architecture="phi3",
        **{"tokenizer.ggml.pre": "gpt-4o"},
    )
    theirs = Tokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer.encode("<|user|>\nthe") == theirs.encode("<|user|>\nthe")


@pytest.mark.parametrize(
    ("pre", "published"),
    [
        ("gpt-2", [_GPT2]),
        ("mellum", [_GPT2]),
        ("smollm", [_DIGITS, _GPT2]),
        ("refact", [_DIGITS, _GPT2]),
        ("minerva-7b", [_DIGITS, _GPT2]),
        (
            "glm4",
            [
                pre_tokenizers.Split(
                    Regex(
                        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                    ),
                    "isolated",
                ),
                _BYTES,
            ],
        ),
        (
            "deepseek-coder",
            [
                *(
                    pre_tokenizers.Split(Regex(pattern), "isolated")
                    for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
                ),
                _DIGITS,
                _BYTES,
            ],
        ),
        (
            "seed-coder",
            [
                pre_tokenizers.Split(
                    Regex(
                        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
                        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
                    ),
                    "isolated",
                ),
                _BYTES,
            ],
        ),
    ],
)
def test_splits(
    pre: str, published: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = converted(tmp_path, byte_level_tokenizer(), **{"tokenizer.ggml.pre": pre})
    split = RustTokenizer.from_str(tokenizer.to_json()).pre_tokenizer.pre_tokenize_str
    expected = pre_tokenizers.Sequence(published).pre_tokenize_str
    for text in ("ied 4 ½ months, 1234 of them", "it's\n\n x += [12]\r\n  ", "Où\t今天天气 ..?!"):
        assert split(text) == expected(text)
    assert not caplog.records


@pytest.mark.parametrize("pre", ["kimi-k9", "default", None])
def test_a_split_that_is_not_known(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trident"):
        converted(tmp_path, byte_level_tokenizer(), **{"tokenizer.ggml.pre": pre})
    assert f"vocabulary.gguf: tokenizer.ggml.pre: {pre!r}" in caplog.text


def test_the_split_of_whole_words(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.pre": "midm-2.0", "tokenizer.ggml.bos_token_id": 1}
    tokenizer = converted(tmp_path, byte_level_tokenizer(), **changes)
    assert tokenizer.encode("the")[0] == 1
    assert json.loads(tokenizer.to_json())["model"]["ignore_merges"]
