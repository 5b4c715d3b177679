"""Requests that come and go at random steps, and random schedulers for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.factories.paged_oracle import PagedOracle
from tests.factories.requests import make_request, make_scheduler

LAST_STEP = 25  # in which somebody may come or go


@dataclass(frozen=True)
class Arrival:
    """A request with `n` samples.

    Attributes:
        step: in which it comes.
        length: of the prompt.
        which: of few prompts, so that prefixes are shared.
        abort: the step in which it is aborted, if it has come before.
    """

    step: int
    length: int
    which: int
    max_tokens: int
    n: int
    priority: int
    abort: int | None
    tenant: str = ""

    def group(self, uid: int) -> list[Request]:
        prompt = [self.which * 10 + i % 7 for i in range(self.length)]
        fields = {
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            "tenant": self.tenant,
        }
        return [make_request(uid, prompt, index=index, **fields) for index in range(self.n)]


# Of the groups of layers; a block has 4 tokens.
WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (5,),
    (None, 6),
    (None, 1, 1),
    (9, 17),
    (None, 4, 13, 4),
)


def arrivals(**changes: st.SearchStrategy[Any]) -> st.SearchStrategy[Arrival]:
    """Draw arrivals, the fields in `changes` from these."""
    fields = {
        "step": st.integers(0, 12),
        "length": st.integers(1, 30),
        "which": st.integers(0, 3),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 4),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from("ab"),
        "abort": st.one_of(st.none(), st.integers(0, LAST_STEP)),
    }
    return st.builds(Arrival, **{**fields, **changes})


def schedulers(**changes: st.SearchStrategy[Any]) -> st.SearchStrategy[Scheduler]:
    """Draw schedulers of few blocks per group, the arguments in `changes` from these."""
    arguments: dict[str, st.SearchStrategy[Any]] = {
        "num_blocks": st.integers(12, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "enable_prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "num_host_blocks": st.one_of(st.just(0), st.integers(1, 60)),
        "windows": st.sampled_from(WINDOWS),
        # Of layers that keep states: none, or blocks beside those of running sequences.
        "spare_states": st.one_of(st.none(), st.integers(0, 12)),
        "state_interval": st.sampled_from([4, 8]),
    }
    return st.builds(_scheduler, **{**arguments, **changes})


def _scheduler(
    num_blocks: int,
    windows: Sequence[int | None],
    max_num_seqs: int,
    spare_states: int | None,
    **others: Any,
) -> Scheduler:
    return make_scheduler(
        num_blocks=num_blocks * len(windows),
        windows=windows,
        max_num_seqs=max_num_seqs,
        num_states=0 if spare_states is None else max_num_seqs + 2 + spare_states,
        **others,
    )


def serve(
    oracle: PagedOracle, arrivals: Sequence[Arrival], groups: Sequence[list[Request]]
) -> set[int]:
    """Run until all have ended; return the uids that were aborted."""
    aborted = set()
    for step in range(LAST_STEP + 1):
        for uid, (arrival, group) in enumerate(zip(arrivals, groups, strict=True)):
            if arrival.step == step:
                oracle.scheduler.add(group)
            late = arrival.abort == step and step > arrival.step
            if late and oracle.scheduler.abort(uid):
                aborted.add(uid)
        if oracle.has_work():
            oracle.step()
    oracle.run()
    return aborted
