"""Words of the field: those that a reader of vLLM, SGLang or TensorRT-LLM would search for.

`exceptions.toml` counts where the other words still stand. The counts only shrink: a commit that
removes a word lowers its count.
"""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "kernels", "client", "model_repository")
EXCEPTIONS = tomllib.loads((Path(__file__).parent / "exceptions.toml").read_text(encoding="utf-8"))

# Parts of an identifier (snake_case or CamelCase) -> the field's name.
_IDENTIFIERS = {
    "admissions": "NewRequestData",
    "advanced": "UpdateResult",
    "awaited prefixes": "in-batch prefix caching",
    "coded": "wna16",
    "conversion": "process_weights_after_loading",
    "forms": "LinearMethod",
    "front": "ClientProtocol",
    "group slots": "slot_mapping",
    "heart": "HeartbeatSender",
    "panel": "cpu_packed_gemm",
    "place": "block_idx, position or field",
    "product": "gemm, gemv",
    "purpose": "task",
    "question": "RequestOptions",
    "sections": "reasoning and tool-call parsing",
    "slot states": "SeqSlots",
    "suspects": "PoisonRequestGuard",
    "token forcer": "jump_forward",
    "token reader": "update_from_output",
    "turn queue": "delivery",
    "victims": "preemption",
}
# Parts of a docstring, comment or message -> what a reader understands at once.
_PROSE = {
    "gives way": "is preempted",
    "manieth": "every 16th",
    "say": "write, report or name",
    "says": "writes, reports or names",
    "tell": "report, send or distinguish",
    "tells": "reports, sends or distinguishes",
    "told": "reported, sent or known",
    "truth value": "bool",
    "truth values": "bools",
}


def _sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _words(text: str) -> list[str]:
    """Return the words of identifiers and sentences, in lower case, without "in place"."""
    text = re.sub(r"in[ _]place(?![a-z])", "", text)
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)]


def _counts(texts: Iterable[str], vocabulary: Iterable[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for text in texts:
        words = _words(text)
        counts.update(words)
        counts.update(" ".join(pair) for pair in pairwise(words))
    return {word: counts[word] for word in sorted(vocabulary) if counts[word]}


def _tokens(*kinds: int) -> Iterator[str]:
    for path in _sources(*PACKAGES):
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            yield from (token.string for token in tokens if token.type in kinds)


def _test_names() -> Iterator[str]:
    for path in _sources("tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name


@pytest.mark.parametrize(
    ("where", "texts", "instead"),
    [
        ("identifiers", lambda: _tokens(tokenize.NAME), _IDENTIFIERS),
        ("prose", lambda: _tokens(tokenize.STRING, tokenize.COMMENT), _PROSE),
        ("test_names", _test_names, _IDENTIFIERS | _PROSE),
    ],
)
def test_glossary_word_that_the_field_does_not_use_becomes_rarer(
    where: str, texts: Callable[[], Iterator[str]], instead: dict[str, str]
) -> None:
    allowed = EXCEPTIONS["words"][where]
    counts = _counts(texts(), instead)
    more = {
        f"{word!r} (take {instead[word]})": f"{count}, allowed {allowed.get(word, 0)}"
        for word, count in counts.items()
        if count > allowed.get(word, 0)
    }
    assert more == {}
    assert counts == allowed, "lower the counts in tests/house/exceptions.toml"


def test_glossary_word_inside_an_identifier_is_found() -> None:
    texts = ["TurnQueue", "num_admissions", "what it is told", "saying", "changed_in_place"]
    found = _counts(texts, _IDENTIFIERS | _PROSE)
    assert found == {"admissions": 1, "told": 1, "turn queue": 1}


def test_test_names_say_unit_condition_and_result() -> None:
    """A name of two words names a unit and neither condition nor result."""
    short = sorted(name for name in set(_test_names()) if len(name.split("_")) <= 3)
    assert set(short) <= set(EXCEPTIONS["short_test_names"])
    assert set(EXCEPTIONS["short_test_names"]) <= set(short), "remove what is gone"
