"""Loads the tokenizer that the settings name, with the chat template that they name."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.hub import resolve_tokenizer
from engine.config.engine_config import EngineConfig
from engine.errors import CheckpointError, ConfigError, RequestError
from engine.text.chat_template import render_text
from engine.text.tokenizer import Tokenizer

_MARKS = "{}\n"  # of a template; a path has none of them


def load_tokenizer(config: EngineConfig, checkpoint: Path) -> Tokenizer:
    """Return the tokenizer for the model in the folder `checkpoint`.

    Raises:
        ConfigError: the chat template of the settings cannot be read, or is broken.
        CheckpointError: there is no such tokenizer, or it is broken.
    """
    tokenizer = Tokenizer.from_pretrained(resolve_tokenizer(config.tokenizer, checkpoint))
    if config.chat_template is None:
        return tokenizer
    tokenizer = tokenizer.with_chat_template(_template(config.chat_template))
    try:
        render_text(tokenizer, [{"role": "user", "content": "a"}])
    except RequestError:
        pass  # it need not take every conversation
    except CheckpointError as error:
        raise ConfigError(str(error), param="chat_template") from None
    return tokenizer


def _template(setting: str) -> str:
    if any(mark in setting for mark in _MARKS):
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}", param="chat_template") from None
    except ValueError as error:  # it is not UTF-8
        raise ConfigError(f"{setting}: {error}", param="chat_template") from None
