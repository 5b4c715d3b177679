"""Columns of log-probabilities survive their message, of any number of tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.prompt_logprobs import logprobs_of, pack, positions


@given(num_tokens=st.integers(0, 20), num_top=st.integers(0, 5), seed=st.integers(0, 2**32))
def test_places_are_the_rows(num_tokens: int, num_top: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids, ranks = draw.integers(0, 2**31 - 1, (2, num_tokens), dtype=np.int32)
    logprobs = draw.normal(size=num_tokens).astype(np.float32)
    top_ids = draw.integers(0, 2**31 - 1, (num_tokens, num_top), dtype=np.int32)
    top_logprobs = draw.normal(size=(num_tokens, num_top)).astype(np.float32)
    message = pack(ids, logprobs, ranks, top_ids, top_logprobs)
    assert logprobs_of(message).tolist() == logprobs.tolist()
    found = list(positions(message))
    assert len(found) == num_tokens
    for index, position in enumerate(found):
        assert position.token_ids == [ids[index], *top_ids[index]]
        assert position.logprobs == [logprobs[index], *top_logprobs[index]]
        assert position.ranks == [ranks[index], *range(1, num_top + 1)]
