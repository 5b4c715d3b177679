"""A fake device that detects every paging error.

It keeps tokens and block table of each slot and receives only changes, like the device. The "KV" of
a token is a hash of all tokens up to it, stored in a paged cache through the block tables, copies
and swaps that the scheduler issues. Each step checks that every sequence finds the right content in
its blocks; the next token is a function of that content. So a request's output is correct exactly
if scheduling, prefix sharing, copying and preemption are.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.integrity import check_integrity
from engine.core.request import Request, SampledToken
from engine.core.schedule import Schedule, ScheduledRequest
from engine.core.scheduler import Scheduler
from engine.execution.block_moves import move_blocks

VOCAB = 50


def chain(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).digest()


def next_token(token_ids: Sequence[int], index: int) -> int:
    return (chain(token_ids)[0] + index) % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """The device's state of a running sequence."""

    request: Request  # only its parameters
    token_ids: list[int]
    block_ids: list[int]
    has_ended: bool = False

    def append(self, token_id: int) -> None:
        """Append a token; end as the device does, without stop strings."""
        self.token_ids.append(token_id)
        num_outputs = len(self.token_ids) - self.request.num_prompt_tokens
        self.has_ended = (
            token_id in self.request.stop_token_ids or num_outputs >= self.request.max_tokens
        )


class BlockStore:
    """Device and host blocks; copies as `kernels.block_copy.BlockCopier` does."""

    def __init__(self, block_size: int) -> None:
        self.device: dict[int, list[bytes]] = defaultdict(lambda: [b""] * block_size)
        self.host: dict[int, list[bytes]] = {}
        self.num_swapped_in = 0

    def swap_out(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.device, self.host, sources, destinations)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.device, self.device, sources, destinations)

    def swap_in(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.host, self.device, sources, destinations)
        self.num_swapped_in += len(sources)


def _copy(
    read: dict[int, list[bytes]],
    written: dict[int, list[bytes]],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    assert len(set(destinations)) == len(sources) == len(destinations)
    contents = [list(read[block]) for block in sources]
    written.update(zip(destinations, contents, strict=True))


class PagedOracle:
    """Runs the steps of `scheduler`, `num_ahead` of them launched before one is read."""

    def __init__(self, scheduler: Scheduler, num_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv_cache.block_size
        self.num_ahead = num_ahead
        self.num_wasted_rows = 0
        self.num_computed_tokens = 0
        self.blocks = BlockStore(self.block_size)
        self._slots: dict[int, Slot] = {}
        self.in_flight: deque[tuple[Schedule, list[SampledToken]]] = deque()

    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests() or bool(self.in_flight)

    def step(self) -> list[Request]:
        schedule = self.scheduler.schedule()
        assert sum(row.num_tokens for row in schedule.rows) <= self.scheduler.max_num_batched_tokens
        if schedule.rows:
            self.in_flight.append((schedule, self.execute(schedule)))
        advanced = []
        while len(self.in_flight) > (self.num_ahead if schedule.rows else 0):
            advanced += self.scheduler.update(*self.in_flight.popleft())
        check_integrity(self.scheduler)
        return advanced

    def run(self, max_steps: int = 2000) -> list[Request]:
        finished = []
        for _ in range(max_steps):
            if not self.has_work():
                return finished
            finished += [r for r in self.step() if r.finish_reason is not None]
        raise AssertionError("the scheduler makes no progress")

    def execute(self, schedule: Schedule) -> list[SampledToken]:
        move_blocks(
            self.blocks,
            swap_out=schedule.swap_out,
            copies=schedule.copies,
            swap_in=schedule.swap_in,
        )
        slots = [self._slot(row) for row in schedule.rows]
        for row, slot in zip(schedule.rows, slots, strict=True):
            if slot.has_ended:
                self.num_wasted_rows += 1
                continue
            self.num_computed_tokens += row.num_tokens
            for position in range(row.start, row.start + row.num_tokens):
                block, place = self._place(slot, position)
                block[place] = chain(slot.token_ids[: position + 1])
        sampled = []
        for row, slot in zip(schedule.rows, slots, strict=True):
            if not slot.has_ended:
                self._check(row, slot)
            if row.wants_token:
                token_id = next_token(slot.token_ids, slot.request.index)
                if not slot.has_ended:
                    slot.append(token_id)
                sampled.append(SampledToken(token_id, 0.0))
        return sampled

    def _slot(self, row: ScheduledRequest) -> Slot:
        request, changed = row.request, row.first_changed_block
        assert request.slot == row.slot
        if changed is None:
            assert request.num_unread_tokens == row.wants_token
            slot = Slot(request, list(request.token_ids), list(request.kv.block_ids))
            self._slots[row.slot] = slot
            return slot
        slot = self._slots[row.slot]
        assert slot.request is request
        slot.block_ids[changed:] = request.kv.block_ids[changed:]
        assert slot.block_ids == request.kv.block_ids
        return slot

    def _check(self, row: ScheduledRequest, slot: Slot) -> None:
        end = row.start + row.num_tokens
        assert row.wants_token == (end == len(slot.token_ids))
        for position in range(end):
            block, place = self._place(slot, position)
            assert block[place] == chain(slot.token_ids[: position + 1]), (
                f"request {slot.request.uid}.{slot.request.index} finds foreign KV at {position}"
            )

    def _place(self, slot: Slot, position: int) -> tuple[list[bytes], int]:
        block_id = slot.block_ids[position // self.block_size]
        return self.blocks.device[block_id], position % self.block_size
