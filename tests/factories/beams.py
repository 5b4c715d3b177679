"""Beam searches on the fake device of `paged_oracle`, and alone."""

from collections.abc import Sequence

import numpy as np

from engine.core.beams.beam import Beam, BeamGroup
from engine.core.beams.beam_search import BeamSearch
from engine.core.schedule import SampledLogprobs
from engine.protocol.messages import TokenLogprobs
from engine.request.sampling_params import SamplingParams
from tests.factories.requests import SEEDS_PER_REQUEST, VOCAB


def most_likely(token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Return `count` tokens that follow `token_ids`, and their log-probabilities, descending."""
    draw = np.random.default_rng([*token_ids])
    logprobs = np.log(draw.dirichlet(np.ones(VOCAB))).astype(np.float32)
    order = np.argsort(-logprobs)[:count]
    return order.tolist(), logprobs[order].tolist()


def sampled_logprobs(rows: Sequence[tuple[int, Sequence[int], int]]) -> SampledLogprobs | None:
    """Return what a step finds of beams: for each its row, its tokens and how many it wants."""
    if not rows:
        return None
    counts = [count for *_, count in rows]
    found = [most_likely(token_ids, max(counts)) for _, token_ids, _ in rows]
    return SampledLogprobs(
        rows=np.array([row for row, *_ in rows], dtype=np.int32),
        logprobs=np.zeros(len(rows), dtype=np.float32),
        ranks=np.ones(len(rows), dtype=np.int32),
        num_top=np.array(counts, dtype=np.int32),
        top_token_ids=np.array([token_ids for token_ids, _ in found], dtype=np.int32),
        top_logprobs=np.array([logprobs for _, logprobs in found], dtype=np.float32),
    )


def candidates(token_ids: Sequence[int], count: int) -> TokenLogprobs:
    """Return `most_likely` in the form that `BeamSearch` takes."""
    found, logprobs = most_likely(token_ids, count)
    return TokenLogprobs([0, *found], [0.0, *logprobs], [1, *range(1, count + 1)])


def make_beams(
    uid: int,
    prompt: Sequence[int],
    *,
    width: int,
    n: int = 1,
    max_tokens: int = 4,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    tenant: str = "",
    **sampling: object,
) -> list[Beam]:
    """Return the sequences of a beam search."""
    params = SamplingParams.parse(
        {"max_tokens": max_tokens, "n": n, "beam_width": width, **sampling}
    )
    search = BeamSearch(
        width,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    group = BeamGroup(search)
    return [
        Beam(
            uid,
            np.asarray(prompt, dtype=np.int32),
            params,
            group=group,
            max_tokens=max_tokens,
            seed=SEEDS_PER_REQUEST * uid + index,
            index=index,
            stop_token_ids=stop_token_ids,
            priority=priority,
            tenant=tenant,
        )
        for index in range(width)
    ]


def expected_beams(beams: Sequence[Beam]) -> list[tuple[list[int], str]]:
    """Return the outputs of the search of new `beams`, and why each ends."""
    first = beams[0]
    params, prompt = first.sampling_params, first.token_ids.tolist()
    search = BeamSearch(
        params.beam_width,
        max_tokens=first.max_tokens,
        stop_token_ids=first.stop_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    while not search.is_over:
        tokens = [[token.token_id for token in beam.path()] for beam in search.live]
        search.advance([candidates(prompt + each, search.num_candidates) for each in tokens])
    return [
        ([token.token_id for token in each.last.path()], "stop" if each.stops else "length")
        for each in search.finished[: params.n]
    ]
