"""A stand-in for the model that notices every paging mistake.

The "KV" of a token is a hash of all tokens up to it, kept in a paged cache through the very block
tables and copies that the scheduler hands out. Each step checks that every sequence finds the
right content in its blocks; the next token is a function of that content. So the output of a
request is right exactly if scheduling, sharing, copying and preemption were.
"""

import hashlib
from collections.abc import Sequence

from engine.core.scheduler import Schedule, Scheduler
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


class PagedOracle:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv_cache.block_size
        self.slots: dict[int, bytes] = {}

    def step(self) -> list[Request]:
        schedule = self.scheduler.schedule()
        assert sum(row.num_tokens for row in schedule.rows) <= self.scheduler.max_num_batched_tokens
        tokens = self._execute(schedule)
        advanced = self.scheduler.update(schedule, tokens)
        self.scheduler.check_integrity()
        return advanced

    def run(self, max_steps: int = 2000) -> list[Request]:
        finished = []
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return finished
            finished += [r for r in self.step() if r.finish_reason is not None]
        raise AssertionError("the scheduler makes no progress")

    def _execute(self, schedule: Schedule) -> list[SampledToken]:
        contents = {
            copy: [
                self.slots.get(copy.source * self.block_size + i) for i in range(self.block_size)
            ]
            for copy in schedule.copies
        }
        for copy, values in contents.items():
            for i, value in enumerate(values):
                self.slots[copy.destination * self.block_size + i] = value or b""
        for row in schedule.rows:
            request = row.request
            end = request.num_computed_tokens + row.num_tokens
            for position in range(request.num_computed_tokens, end):
                self.slots[self._slot(request, position)] = chain(request.token_ids[: position + 1])
        sampled = []
        for row in schedule.rows:
            request = row.request
            end = request.num_computed_tokens + row.num_tokens
            for position in range(end):
                found = self.slots.get(self._slot(request, position))
                assert found == chain(request.token_ids[: position + 1]), (
                    f"request {request.uid}.{request.index} finds foreign KV at {position}"
                )
            if row.wants_token:
                sampled.append(SampledToken(next_token(request.token_ids, request.index), 0.0))
        return sampled

    def _slot(self, request: Request, position: int) -> int:
        return request.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
