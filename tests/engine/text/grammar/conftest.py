"""One compiler for the tokenizer of the bundled model."""

from collections.abc import Iterator

import pytest

from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import RandomWriter, demo_tokenizer


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(demo: Tokenizer) -> Vocabulary:
    return Vocabulary.of(demo, demo.vocab_size, [2])


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def writer(demo: Tokenizer, vocabulary: Vocabulary) -> RandomWriter:
    return RandomWriter(demo, vocabulary)
