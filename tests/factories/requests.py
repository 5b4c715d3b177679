"""Requests and schedulers for tests, with small defaults."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.core.constraints.mask_workers import MaskWorkers
from engine.core.kv.group_windows import GroupWindows
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.kv.state_manager import StateManager
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.spec_decode.proposer import Proposer
from engine.request.sampling_params import SamplingParams
from engine.text.byte_sets import ALL_BYTES
from engine.text.stop.checker import StopMatch

SEEDS_PER_REQUEST = 1024
VOCAB = 50  # of the models that these requests run on


def make_request(
    uid: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    index: int = 0,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    stop_token_ids: frozenset[int] = frozenset(),
    **sampling: object,
) -> Request:
    params = SamplingParams.parse({"max_tokens": max_tokens, **sampling})
    return Request(
        uid,
        np.asarray(prompt, dtype=np.int32),
        params,
        max_tokens=max_tokens,
        seed=SEEDS_PER_REQUEST * uid + index,
        index=index,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
        stop_token_ids=stop_token_ids,
    )


def append_tokens(request: Request, token_ids: Iterable[int]) -> None:
    """Add output tokens to a sequence that has no slot."""
    assert request.slot is None
    request.tokens = np.append(request.token_ids, np.fromiter(token_ids, np.int32))
    request.num_tokens = len(request.tokens)


def make_scheduler(
    *,
    num_blocks: int = 17,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    policy: str = "fcfs",
    num_host_blocks: int = 0,
    max_model_len: int = 256,
    windows: Sequence[int | None] = (None,),
    proposer: Proposer | None = None,
    mask_workers: MaskWorkers | None = None,
    num_states: int = 0,
    state_interval: int = 8,
) -> Scheduler:
    cache = KVCacheManager(
        num_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        windows=GroupWindows(
            windows,
            block_size,
            max_step_tokens=long_prefill_token_threshold or max_num_batched_tokens,
        ),
        states=(
            StateManager(num_states, interval=state_interval, every=4 * state_interval)
            if num_states
            else None
        ),
    )
    return Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=policy,  # type: ignore[arg-type]
        max_model_len=max_model_len,
        token_bytes=np.tile(ALL_BYTES, (VOCAB, 1)),
        proposer=proposer,
        mask_workers=mask_workers,
    )


def reuse_prefix(cache: KVCacheManager, request: Request) -> int:
    """Give `request` its cached prefix; return the number of its tokens."""
    prefix = cache.prefix_cache.find(request)
    cache.reuse_prefix(request, prefix)
    return prefix.num_tokens


class StopString:
    """A stop checker that finds its string where a certain token is: on the host alone."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.match: StopMatch | None = None
        self.num_tokens = 0
        self.num_held_tokens = 0
        self.watch = ALL_BYTES

    def skip(self, num_tokens: int) -> None:
        assert num_tokens == 0

    def append(self, token_id: int) -> None:
        self.num_tokens += 1
        if token_id == self.token_id:
            self.match = StopMatch("stop", 0, 4)

    def finish(self) -> int:
        return 4


def note_passed_over(scheduler: Scheduler) -> set[Request]:
    """Return a set that gets the requests that `scheduler` passes over from now on."""
    found: set[Request] = set()
    pass_over = scheduler.waiting.pass_over

    def noted(request: Request) -> None:
        found.add(request)
        pass_over(request)

    scheduler.waiting.pass_over = noted  # type: ignore[method-assign]
    return found
