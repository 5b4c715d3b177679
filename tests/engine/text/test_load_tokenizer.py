"""The tokenizer that the settings name, and the chat template in place of the checkpoint's."""

from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.text.chat_template import render_text
from engine.text.load_tokenizer import load_tokenizer
from tests.factories.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_tokenizer,
)

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return save_tokenizer(byte_level_tokenizer(), folder)


def test_that_of_the_checkpoint_or_another(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_tokenizer(byte_fallback_tokenizer(), other)
    own = load_tokenizer(EngineConfig.parse({}), checkpoint)
    given = load_tokenizer(EngineConfig.parse({"tokenizer": other}), checkpoint)
    assert not own.byte_fallback_ids
    assert given.byte_fallback_ids


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_in_place_of_the_checkpoints(
    checkpoint: Path, tmp_path: Path, as_file: bool
) -> None:
    template = "Q: {{ messages[0].content }}"
    (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
    setting = tmp_path / "own.jinja" if as_file else template
    own = load_tokenizer(EngineConfig.parse({}), checkpoint)
    tokenizer = load_tokenizer(EngineConfig.parse({"chat_template": setting}), checkpoint)
    assert render_text(tokenizer, MESSAGES) == "Q: x"
    assert tokenizer.chat_template_text == template
    assert tokenizer.encode("a b") == own.encode("a b")


def test_a_template_that_refuses_a_conversation_may_take_others(checkpoint: Path) -> None:
    template = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}"
    template += "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = load_tokenizer(EngineConfig.parse({"chat_template": template}), checkpoint)
    assert render_text(tokenizer, [*MESSAGES, {"role": "assistant", "content": "y"}]) == "xy"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nowhere.jinja", r"^chat_template: nowhere\.jinja: No such file"),
        ("/", r"^chat_template: /: Is a directory"),
        ("{% if %}", r"^chat_template: chat template: line 1: "),
        ("a\n{{ messages", r"^chat_template: chat template: line 2: "),
    ],
)
def test_one_that_cannot_be_used_ends_the_start(
    checkpoint: Path, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(EngineConfig.parse({"chat_template": setting}), checkpoint)


def test_a_file_of_another_encoding(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin.jinja"
    file.write_bytes("Frage: für".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^chat_template: .*latin\.jinja: 'utf-8' codec"):
        load_tokenizer(EngineConfig.parse({"chat_template": file}), checkpoint)
