"""Running one step ahead changes no token: the synchronous loop is the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.schedule import SchedulerOutput
from engine.execution.model_runner import ModelRunner
from engine.protocol.messages import AddRequest, SequenceOutput, TokenLogprobs
from engine.protocol.prompt_logprobs import positions
from engine.protocol.token_ids import pack_token_ids
from kernels.cpu.library import operations
from tests.factories.outputs import listed

VOCAB = 400
_uids = count()


@dataclass
class Answer:
    """All that came of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | str | None = None
    text_cut: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None

    def take(self, output: SequenceOutput) -> None:
        assert self.reason is None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = list(positions(output.prompt_logprobs))
        self.reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.text_cut = output.text_cut
        if output.stats is not None:
            self.num_preemptions = output.stats.num_preemptions


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when it is cancelled."""

    step: int
    prompt: list[int]
    sampling: dict[str, Any]
    priority: int
    cancel: int | None


def make_core(checkpoint: Path, *, is_ahead: bool, num_blocks: int = 26) -> EngineCore:
    fields = {
        "model": str(checkpoint),
        "dtype": "float32",
        # A draw may fall between two tokens, where the last bit of a logit decides.
        "deterministic": operations(torch.empty(0)) is not None,
        "async_scheduling": is_ahead,
        "block_size": 4,
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": 64,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "scheduling_policy": "priority",
    }
    return EngineCore(EngineConfig.parse(fields))


@pytest.fixture(scope="module")
def cores(checkpoint: Path) -> tuple[EngineCore, EngineCore]:
    return make_core(checkpoint, is_ahead=False), make_core(checkpoint, is_ahead=True)


def serve(
    core: EngineCore, arrivals: list[Arrival], *, with_cancels: bool
) -> dict[tuple[int, int], Answer]:
    """Return the answers, by index of the request and index of the sequence."""
    indices: dict[int, int] = {}
    answers: dict[tuple[int, int], Answer] = {}

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            answers.setdefault((indices[output.uid], output.index), Answer()).take(output)

    step = 0
    while step <= max(a.step for a in arrivals) or core.has_unfinished_requests():
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                uid = next(_uids)
                indices[uid] = index
                core.add_request(
                    AddRequest(
                        uid,
                        pack_token_ids(arrival.prompt),
                        arrival.sampling,
                        priority=arrival.priority,
                    )
                )
            if with_cancels and arrival.cancel == step:
                for uid in [uid for uid, known in indices.items() if known == index]:
                    take(listed(core.abort(uid)))
        take(listed(core.step()))
        core.check_integrity()
        step += 1
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
    return answers


_TOKENS = st.integers(1, VOCAB - 1)
_SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "ignore_eos": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        "seed": st.integers(0, 3),
        "top_k": st.sampled_from([0, 5, 50]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(_TOKENS, max_size=40).map(tuple),
        "stop": st.lists(st.sampled_from(["a", "e", "1", " ", "th"]), max_size=2).map(tuple),
        "bad_words": st.just(("a", "the")),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.6]),
        "logit_bias": st.dictionaries(_TOKENS, st.sampled_from([-5.0, 5.0]), max_size=3),
        "allowed_token_ids": st.lists(_TOKENS, min_size=1, max_size=9, unique=True).map(tuple),
    },
)


def _complete(sampling: dict[str, Any]) -> dict[str, Any]:
    min_tokens = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
    return {"seed": 0, **sampling, "min_tokens": min_tokens}


_ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 15),
        # Of few beginnings, so that prefixes are shared.
        prompt=st.builds(
            lambda start, length: [(start * 7 + i) % (VOCAB - 1) + 1 for i in range(length)],
            st.integers(0, 2),
            st.integers(1, 36),
        ),
        sampling=_SAMPLING.map(_complete),
        priority=st.integers(-1, 1),
        cancel=st.one_of(st.none(), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=max(40, settings.default.max_examples // 10))  # type: ignore[union-attr]
@given(arrivals=_ARRIVALS)
def test_every_token_is_that_of_the_synchronous_loop(
    cores: tuple[EngineCore, EngineCore], arrivals: list[Arrival]
) -> None:
    """Under random arrivals, parameters, stops, cancels and preemptions."""
    synchronous, ahead = cores
    expected = serve(synchronous, arrivals, with_cancels=False)
    found = serve(ahead, arrivals, with_cancels=True)
    for key, answer in found.items():
        reference = expected[key]
        if answer.reason == "abort":
            length = len(answer.token_ids)
            assert answer.token_ids == reference.token_ids[:length]
            continue
        assert answer.token_ids == reference.token_ids
        check_prompt_logprobs(arrivals[key[0]], key[1], answer, reference)
        assert (answer.reason, answer.stop_reason) == (reference.reason, reference.stop_reason)
        assert answer.text_cut == reference.text_cut
        for mine, theirs in zip(answer.logprobs, reference.logprobs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    missing = expected.keys() - found.keys()
    assert all(arrivals[index].cancel is not None for index, _ in missing)


def check_prompt_logprobs(arrival: Arrival, index: int, answer: Answer, reference: Answer) -> None:
    """Assert that the first sequence of a request has them, if it asked for them."""
    if arrival.sampling.get("prompt_logprobs") is None or index > 0:
        assert answer.prompt_logprobs is None
        return
    assert answer.prompt_logprobs is not None
    assert reference.prompt_logprobs is not None
    assert [token.token_ids[0] for token in answer.prompt_logprobs] == arrival.prompt[1:]
    for mine, theirs in zip(answer.prompt_logprobs, reference.prompt_logprobs, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_sequences_are_preempted_in_these_engines(checkpoint: Path) -> None:
    """What the property above relies on."""
    core = make_core(checkpoint, is_ahead=True)
    sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    arrivals = [Arrival(i, [i + 1] * 20, sampling, 0, None) for i in range(5)]
    answers = serve(core, arrivals, with_cancels=False)
    assert sum(answer.num_preemptions for answer in answers.values()) > 0


def test_a_step_is_launched_before_the_one_before_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    forward = ModelRunner.forward

    def note(runner: ModelRunner, schedule: SchedulerOutput) -> None:
        launched.append(schedule)
        forward(runner, schedule)

    monkeypatch.setattr(ModelRunner, "forward", note)
    core = make_core(checkpoint, is_ahead=True)
    core.add_request(
        AddRequest(next(_uids), pack_token_ids([1, 2, 3]), {"max_tokens": 5, "ignore_eos": True})
    )
    num_tokens = []
    while core.has_unfinished_requests():
        num_tokens.append(sum(len(output.token_ids) for output in listed(core.step())))
    # Nothing can be read of the first step, and nothing is launched with the last read.
    assert num_tokens == [0, 1, 1, 1, 1, 1]
    assert len(launched) == 5
