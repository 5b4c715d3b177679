"""When tokens are guessed, and whom that must not harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError, UnsupportedError
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.engine.test_spec_decode import NGRAM, REPEATED, SETTINGS


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"device": "null"}, UnsupportedError, "speculative_config: .* on CPU only"),
        ({"async_scheduling": True}, ConfigError, "async_scheduling: must be false"),
    ],
    ids=str,
)
def test_where_it_cannot_be(
    checkpoint: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        LLM(str(checkpoint), speculative_config=NGRAM, **{**SETTINGS, **settings})


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_the_next_turn_finds_the_cached_blocks_of_its_own_sample(
    checkpoint: Path, block_size: int
) -> None:
    """The block behind the prompt is shared with samples that wait until the first has ended."""
    prompt = [*REPEATED, *REPEATED, *REPEATED, *REPEATED, 5][-(2 * block_size - 3) :]
    sample = SamplingParams(n=2, temperature=1.5, seed=3, max_tokens=30, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for speculative_config in (None, NGRAM):
        # The last chunk of the prompt is one token, like that of a sequence that decodes.
        llm = LLM(
            str(checkpoint),
            dtype="float32",
            block_size=block_size,
            max_num_seqs=1,
            max_num_batched_tokens=len(prompt) - 1,
            speculative_config=speculative_config,
        )
        [result] = llm.generate([prompt], sample, use_tqdm=False)
        turns = [[*prompt, *output.token_ids] for output in result.outputs]
        found = [llm.generate([turn], greedy, use_tqdm=False)[0] for turn in turns]
        assert all(each.metrics.num_cached_tokens > len(prompt) for each in found)
        answers.append((turns, [each.outputs[0].token_ids for each in found]))
        llm.check_integrity()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("chunked", [False, True])
def test_who_waits_is_admitted_as_soon_as_without_drafts(
    checkpoint: Path, *, chunked: bool
) -> None:
    fields: dict[str, Any] = {"max_num_batched_tokens": 128, "max_model_len": 128}
    llm = LLM(
        str(checkpoint),
        speculative_config=NGRAM,
        enable_chunked_prefill=chunked,
        num_gpu_blocks_override=60,
        **{**SETTINGS, **fields},
    )
    core = llm._core
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [5]}
    core.add_request(AddRequest(1, pack_token_ids([5] * 8), params))
    for _ in range(3):
        core.step()
    assert core.take_stats().num_accepted_tokens
    core.add_request(AddRequest(2, pack_token_ids(list(range(5, 130))), {"max_tokens": 2}))
    core.step()
    assert len(core.scheduler.running) == 2
    for uid in (1, 2):
        core.abort(uid)
    core.check_idle()
