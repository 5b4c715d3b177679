"""A stand-in for the device that notices every paging mistake.

It keeps the tokens and the block table of each slot, and is told of changes only, as the device is.
The "KV" of a token is a hash of all tokens up to it, kept in a paged cache through the very block
tables and copies that the scheduler hands out. Each step checks that every sequence finds the
right content in its blocks; the next token is a function of that content. So the output of a
request is right exactly if scheduling, sharing, copying and preemption were.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.scheduler import Schedule, ScheduledRequest, Scheduler
from engine.request import Request, SampledToken

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
    """What the device knows of a running sequence."""

    request: Request  # its parameters alone
    token_ids: list[int]
    block_ids: list[int]
    has_ended: bool = False

    def append(self, token_id: int) -> None:
        """Add a token; end as the device does, which knows nothing of stop strings."""
        self.token_ids.append(token_id)
        num_outputs = len(self.token_ids) - self.request.num_prompt_tokens
        self.has_ended = (
            token_id in self.request.stop_token_ids or num_outputs >= self.request.max_tokens
        )


class PagedOracle:
    """Runs the steps of `scheduler`, of which `num_ahead` are launched before one is read."""

    def __init__(self, scheduler: Scheduler, num_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv_cache.block_size
        self.num_ahead = num_ahead
        self.num_wasted_rows = 0
        self.cache: dict[int, bytes] = {}
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
        self.scheduler.check_integrity()
        return advanced

    def run(self, max_steps: int = 2000) -> list[Request]:
        finished = []
        for _ in range(max_steps):
            if not self.has_work():
                return finished
            finished += [r for r in self.step() if r.finish_reason is not None]
        raise AssertionError("the scheduler makes no progress")

    def execute(self, schedule: Schedule) -> list[SampledToken]:
        contents = {
            copy: [
                self.cache.get(copy.source * self.block_size + i) for i in range(self.block_size)
            ]
            for copy in schedule.copies
        }
        for copy, values in contents.items():
            for i, value in enumerate(values):
                self.cache[copy.destination * self.block_size + i] = value or b""
        slots = [self._slot(row) for row in schedule.rows]
        for row, slot in zip(schedule.rows, slots, strict=True):
            if slot.has_ended:
                self.num_wasted_rows += 1
                continue
            for position in range(row.start, row.start + row.num_tokens):
                self.cache[self._place(slot, position)] = chain(slot.token_ids[: position + 1])
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
        request = row.request
        assert request.slot is not None
        if row.is_new:
            assert request.num_unread_tokens == row.wants_token
            slot = Slot(request, list(request.token_ids), list(request.block_ids))
            self._slots[request.slot] = slot
        slot = self._slots[request.slot]
        assert slot.request is request
        slot.block_ids[row.first_changed_block :] = request.block_ids[row.first_changed_block :]
        assert slot.block_ids == request.block_ids
        return slot

    def _check(self, row: ScheduledRequest, slot: Slot) -> None:
        end = row.start + row.num_tokens
        assert row.wants_token == (end == len(slot.token_ids))
        for position in range(end):
            found = self.cache.get(self._place(slot, position))
            assert found == chain(slot.token_ids[: position + 1]), (
                f"request {slot.request.uid}.{slot.request.index} finds foreign KV at {position}"
            )

    def _place(self, slot: Slot, position: int) -> int:
        return slot.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
