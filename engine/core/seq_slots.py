"""SeqSlots: the host's mirror of the running sequences, in columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.counter import NUM_COUNTERS
from engine.core.queue.tenant_shares import TenantShares
from engine.core.request import Request

FREE = 0


class SeqSlots:
    """One entry per slot in each column; the entries of free slots are meaningless.

    While a sequence has a slot, `request.counters` and `request.tokens` are views of its entries:
    there is one copy of each number, and both a step over all rows and the code for one request
    change it.

    Attributes:
        token_ids: int32 [S, max_model_len], prompt, then output as far as it has been read.
        num_tokens, num_computed_tokens, num_released_tokens, num_state_tokens, num_prompt_tokens,
            max_num_tokens: int32 [S], as the attributes of `Request`.
        num_unread_tokens: int32 [S], tokens sampled by steps in flight: on the device alone.
        capacity: int32 [S], tokens up to which the sequence can write into its blocks.
        reserved: int32 [S], the same for its blocks in groups of layers without a window.
        state_reads, state_writes: int32 [S], blocks of the next step in layers that keep states.
        has_window: bool [S], the context needed to decode the next tokens to release is kept in
            `request.output.window_ids`; else it is the token before them.
        serial: int64 [S], another number each time that a slot is assigned; `FREE` if free.
        uid: int64 [S].
        index: int32 [S].
        host_chooses: bool [S], as `Request.host_chooses` after the last token that was read.
        is_watched: bool [S], as `Request.is_watched`.
        has_grammar: bool [S].
        has_stop_strings: bool [S].
        watched_bytes: uint64 [S, 4], as `StopChecker.watch`, of those with stop strings.
        skips_special_tokens: int32 [S], 1 if special tokens are left out of the text.
        is_streamed: bool [S], outputs are due before the end.
        has_logprobs: bool [S], outputs have the log-probabilities of their tokens.
        wants_embedding: bool [S], the last hidden state of the prompt is the output.
        last_token_time: float64 [S], by `time.monotonic()`; 0 before the first token.
        requests: the sequence in each slot, or None.
        shares: of the slots, by tenant.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        """Start with all slots free. Pages of `token_ids` take memory when they are written."""
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self._block_size = block_size
        self._counters = np.zeros((NUM_COUNTERS, num_slots), dtype=np.int32)
        self.num_tokens, self.num_computed_tokens = self._counters[:2]
        self.num_released_tokens, self.num_state_tokens = self._counters[2:]
        ints = np.zeros((9, num_slots), dtype=np.int32)
        self.num_unread_tokens, self.num_prompt_tokens, self.max_num_tokens = ints[:3]
        self.capacity, self.reserved, self.index, self.skips_special_tokens = ints[3:7]
        self.state_reads, self.state_writes = ints[7:]
        flags = np.zeros((8, num_slots), dtype=np.bool_)
        self.host_chooses, self.is_watched, self.has_stop_strings, self.has_grammar = flags[:4]
        self.has_window, self.is_streamed, self.has_logprobs, self.wants_embedding = flags[4:]
        self.watched_bytes = np.zeros((num_slots, 4), dtype=np.uint64)
        self.serial = np.full(num_slots, FREE, dtype=np.int64)
        self.uid = np.zeros(num_slots, dtype=np.int64)
        self.last_token_time = np.zeros(num_slots, dtype=np.float64)
        self.requests: list[Request | None] = [None] * num_slots
        self.shares = TenantShares()
        self.free = list(reversed(range(num_slots)))
        self._last_serial = FREE

    def assign(self, request: Request) -> int:
        """Give a free slot to `request`, and return it."""
        assert request.slot is None
        slot = self.free.pop()
        self._last_serial += 1
        self.serial[slot] = self._last_serial
        self.requests[slot] = request
        self.shares.begin(request.tenant)
        self._counters[:, slot] = request.counters
        request.counters = self._counters[:, slot]
        self.token_ids[slot, : request.num_tokens] = request.token_ids
        request.tokens = self.token_ids[slot]
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.max_num_tokens[slot] = request.max_num_tokens
        self.uid[slot] = request.uid
        self.index[slot] = request.index
        self.host_chooses[slot] = request.host_chooses
        self.is_watched[slot] = request.is_watched
        self.has_grammar[slot] = request.grammar is not None
        checker = request.output.stop_checker
        self.has_stop_strings[slot] = checker is not None
        self.watched_bytes[slot] = 0 if checker is None else checker.watch
        self.has_window[slot] = bool(request.output.window_ids)
        self.skips_special_tokens[slot] = request.sampling_params.skip_special_tokens
        self.is_streamed[slot] = request.stream
        self.has_logprobs[slot] = request.sampling_params.logprobs is not None
        self.wants_embedding[slot] = request.sampling_params.return_embedding
        self.last_token_time[slot] = request.times.last_token
        request.slot = slot
        self.set_blocks(request)
        return slot

    def set_blocks(self, request: Request) -> None:
        """Note that the running `request` has got blocks, to which it may write its next tokens."""
        assert request.slot is not None
        lengths = [len(table) for table in request.kv.tables]
        # Groups without a window get blocks for all tokens at once.
        self.capacity[request.slot] = min(lengths) * self._block_size
        self.reserved[request.slot] = max(lengths) * self._block_size
        self.state_reads[request.slot] = request.kv.state_read
        self.state_writes[request.slot] = request.kv.state

    def share_tail(self, request: Request) -> None:
        """Note that `request` must not write into the block of its last token: others share it."""
        assert request.slot is not None
        full = request.num_computed_tokens // self._block_size
        self.capacity[request.slot] = self.reserved[request.slot] = full * self._block_size

    def release(self, request: Request) -> None:
        """Free the slot of `request`, which keeps its own copy of its state.

        Its tokens in flight are dropped.
        """
        slot = request.slot
        assert slot is not None
        request.tokens = request.token_ids.copy()
        request.counters = request.counters.copy()
        request.times.last_token = float(self.last_token_time[slot])
        request.slot = None
        self.num_unread_tokens[slot] = 0
        self.serial[slot] = FREE
        self.requests[slot] = None
        self.shares.end(request.tenant)
        self.free.append(slot)

    def owner(self, slot: int) -> Request:
        """Return the sequence in `slot`, which is not free."""
        request = self.requests[slot]
        assert request is not None
        return request

    def is_owned(self, slot: int, serial: int) -> bool:
        """Whether `slot` has not been assigned again since it was by `serial`, nor freed."""
        return bool(self.serial[slot] == serial)

    def in_use(self) -> NDArray[np.int32]:
        """Return the slots of all running sequences, ascending."""
        return np.flatnonzero(self.serial).astype(np.int32)

    def ready(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return those of `slots` that the next step can advance, and the tokens they have left.

        The others have a token in flight that must be read before, because it may be the last one
        or because the host takes part in choosing the next.
        """
        num_unread = self.num_unread_tokens[slots]
        num_tokens = self.num_tokens[slots] + num_unread
        may_end = num_tokens >= self.max_num_tokens[slots]
        is_ready = (num_unread == 0) | ~(may_end | self.host_chooses[slots])
        slots = slots[is_ready]
        return slots, num_tokens[is_ready] - self.num_computed_tokens[slots]

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert that each of `running` has a slot of its own with what is known of it."""
        slots = [request.slot for request in running if request.slot is not None]
        assert len(slots) == len(running)
        assert sorted([*slots, *self.free]) == list(range(len(self.serial)))
        assert sorted(slots) == self.in_use().tolist()
        assert self.shares.num_running == Counter(request.tenant for request in running)
        for request in running:
            slot = request.slot
            assert slot is not None
            assert self.requests[slot] is request
            assert np.shares_memory(request.counters, self._counters)
            assert np.shares_memory(request.tokens, self.token_ids[slot])
            held = request.kv.num_blocks * self._block_size
            assert request.num_computed_tokens <= held
            assert held - self.capacity[slot] in (0, self._block_size)
            assert self.uid[slot] == request.uid
            assert self.max_num_tokens[slot] == request.max_num_tokens
