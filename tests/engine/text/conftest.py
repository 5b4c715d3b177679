"""Tokenizers for the text tests; building one takes a moment, so each is built once."""

from functools import cache

import pytest

from engine.text.detokenizer import Detokenizer, TokenFlags
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import (
    few_bytes_tokenizer,
    metaspace_tokenizer,
    word_piece_tokenizer,
)
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

BUILDERS = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "gemma": lambda: byte_fallback_tokenizer(strip=False),
    "few_bytes": few_bytes_tokenizer,
    "metaspace": metaspace_tokenizer,
    "word_piece": word_piece_tokenizer,
}


@cache
def _detokenizer(kind: str) -> Detokenizer:
    return Detokenizer(Tokenizer(BUILDERS[kind]()))


@cache
def token_flags(detokenizer: Detokenizer) -> TokenFlags:
    """Return the flags of a model that knows three ids more than the tokenizer."""
    return detokenizer.token_flags(detokenizer.tokenizer.vocab_size + 3)


@pytest.fixture(scope="session", params=BUILDERS)
def detokenizer(request: pytest.FixtureRequest) -> Detokenizer:
    return _detokenizer(request.param)


@pytest.fixture(scope="session")
def byte_level() -> Detokenizer:
    return _detokenizer("byte_level")


@pytest.fixture(scope="session")
def byte_fallback() -> Detokenizer:
    return _detokenizer("byte_fallback")
