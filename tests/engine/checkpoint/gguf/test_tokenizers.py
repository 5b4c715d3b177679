"""Tokenizers of GGUF files find the tokens that llama.cpp and the published tokenizers find."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import read_gguf
from engine.checkpoint.gguf.tokenizer import write_tokenizer
from engine.errors import CheckpointError
from engine.fields import Fields
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


def tokens_of(file: Path) -> list[str]:
    return Fields(read_gguf(file).metadata, name=file.name).texts("tokenizer.ggml.tokens") or []


NAMED = ("bos", "eos", "eot", "eom")
IN_BYTES = "<|{}|>"
BEYOND_BYTES = (
    "<\uff5c{}▁of▁sentence\uff5c>"  # DeepSeek's; some letters are not of the byte alphabet
)


def named_tokens(
    tokenizer: Any, text: str, kind: TokenType, names: Sequence[str] = NAMED
) -> tuple[dict[str, int], dict[str, Any]]:
    """Add a token for each field of `names`; return their ids, and the changes of a GGUF file."""
    texts = [text.format(name) for name in names]
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=True) for each in texts])
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(texts), strict=True))

    def with_kind(kinds: list[int]) -> list[int]:
        return [kind if i in ids.values() else each for i, each in enumerate(kinds)]

    fields = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
    return ids, {"tokenizer.ggml.token_type": with_kind, **fields}


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.NORMAL, TokenType.UNUSED])
@pytest.mark.parametrize(
    ("pre", "text"),
    [
        (None, IN_BYTES),  # a vocabulary of SentencePiece
        ("gpt-2", IN_BYTES),
        *((pre, BEYOND_BYTES) for pre in (None, "gpt-2", "llama-bpe", "deepseek-coder", "qwen2")),
    ],
)
def test_special_tokens_of_any_text_and_type_keep_their_ids(
    pre: str | None, text: str, kind: TokenType, tmp_path: Path
) -> None:
    plain = byte_level_tokenizer() if pre else byte_fallback_tokenizer()
    ids, changes = named_tokens(plain, text, kind)
    changes["tokenizer.ggml.add_bos_token"] = True
    if pre:
        changes["tokenizer.ggml.pre"] = pre
    tokenizer = converted(tmp_path, plain, **changes)
    theirs = Tokenizer.from_pretrained(tmp_path / "plain")
    for name, token_id in ids.items():
        written = text.format(name)
        assert tokenizer.encode(written, add_special_tokens=False) == [token_id]
        assert tokenizer.decode([token_id], False) == theirs.decode([token_id], False)
    assert tokenizer.special_ids >= set(ids.values())
    assert tokenizer.hf_tokenizer.bos_token_id == ids["bos"]
    assert tokenizer.eos_token_id == ids["eos"]
    assert tokenizer.encode("the") == [ids["bos"], *theirs.encode("the", add_special_tokens=False)]
    assert tokenizer.vocab_size == len(tokens_of(tmp_path / "vocabulary.gguf"))


@pytest.mark.parametrize("name", ["padding", "unknown"])
@pytest.mark.parametrize("text", [IN_BYTES, BEYOND_BYTES])
def test_padding_with_a_token_of_text_leaves_it_text(name: str, text: str, tmp_path: Path) -> None:
    plain = byte_level_tokenizer()
    ids, changes = named_tokens(plain, text, TokenType.NORMAL, [name])
    tokenizer = converted(tmp_path, plain, **changes)
    assert ids[name] not in tokenizer.special_ids
    assert tokenizer.vocab_size == len(tokens_of(tmp_path / "vocabulary.gguf"))
    assert tokenizer.decode([*ids.values()]) == text.format(name)


def test_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.model": "t5"}
    with pytest.raises(CheckpointError, match="the tokenizer type 't5' is not"):
        converted(tmp_path, byte_fallback_tokenizer(), **changes)


@pytest.mark.large
def test_special_tokens_of_llama_cpp_keep_their_ids(vocabularies: Path, tmp_path: Path) -> None:
    for file in sorted(vocabularies.glob("*.gguf")):
        fields, tokens = read_gguf(file).metadata, tokens_of(file)
        if fields["tokenizer.ggml.model"] not in ("gpt2", "llama"):
            continue
        tokenizer = read(tmp_path / file.stem, file)
        for name in (name for name in fields if name.endswith("_token_id")):
            token_id = fields[name]
            assert tokenizer.encode(tokens[token_id], add_special_tokens=False) == [token_id], name
        assert max(tokenizer.encode("the"), default=0) < len(tokens)
        assert tokenizer.vocab_size == len(tokens)


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
