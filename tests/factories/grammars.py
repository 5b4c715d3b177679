"""Random texts that a grammar allows, by drawing tokens from its masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.text.grammar.matcher import SequenceGrammar
from engine.text.grammar.request_formats import parse_structured_outputs
from engine.text.grammar.spec import GrammarSpec
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer

CLOSING = 4.0  # added to the logits of tokens that close something, so that texts end


def spec(**fields: object) -> GrammarSpec:
    """Return what `structured_outputs` with `fields` asks for."""
    return parse_structured_outputs(fields)


def demo_tokenizer() -> Tokenizer:
    """Return that of the bundled model."""
    return Tokenizer.from_pretrained(Path("engine/demo/checkpoint"))


def follows(start: LLMatcher, text: str, demo: Tokenizer) -> tuple[bool, bool]:
    """Tell whether the grammar allows `text`, and whether it may end there."""
    ids, fresh = demo.encode(text, add_special_tokens=False), start.deep_copy()
    taken = fresh.try_consume_tokens(ids) == len(ids)
    return taken, taken and fresh.is_accepting()


def allowed_ids(mask: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the ids that one row of masks allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


class RandomWriter:
    """Writes texts with random logits at temperature 1.5, as a model with random weights does."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._ends = vocabulary.eos_token_ids
        self._num_ids = vocabulary.num_ids
        self._size = vocabulary.size
        self._bias = np.zeros(32 * -(-vocabulary.size // 32))
        for token_id in tokenizer.text_token_ids():
            text = tokenizer.token_text(token_id)
            if text in ('"', "}", "]", ",", ":", '",', '":', '"}', '"]') or not text.strip(
                " \n\r\t"
            ):
                self._bias[token_id] = CLOSING if text.strip() else -CLOSING
        self._bias[[token for token in self._ends if token < vocabulary.size]] = CLOSING

    def write(
        self, matcher: LLMatcher, seed: int, max_tokens: int = 400, until: str | None = None
    ) -> str | None:
        """Return a text of the grammar; None if it did not end within `max_tokens`.

        It may also end with the text `until`.
        """
        draw, grammar, ids = (
            np.random.default_rng(seed),
            SequenceGrammar(matcher, self._num_ids),
            [],
        )
        for _ in range(max_tokens):
            allowed = allowed_ids(grammar.mask(self._size))
            logits = (draw.gumbel(size=len(allowed)) * 1.5 + draw.normal(size=len(allowed))) + (
                self._bias[allowed]
            )
            token_id = int(allowed[logits.argmax()])
            is_over = grammar.take(token_id)
            if token_id not in self._ends:
                ids.append(token_id)
            text = (
                self._tokenizer.decode(ids, skip_special_tokens=False) if is_over or until else ""
            )
            if is_over or (until and text.endswith(until)):
                return text
        return None
