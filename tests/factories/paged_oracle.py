"""A fake device that detects every paging error.

It keeps tokens and block table of each slot and receives only changes, like the device. The "KV" of
a token is a hash of all tokens up to it and of the group of layers, stored in a paged cache through
the block tables, copies and swaps that the scheduler issues. Each step checks that every sequence
finds the right content in the blocks of each group, where its tokens look; the next token is a
function of that content. The state of a sequence, in layers that keep one, is a hash of the tokens
that it has consumed. So a request's output is correct exactly if scheduling, prefix sharing,
copying and preemption are.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.kv.block_pool import NULL_BLOCK
from engine.core.logprobs.scored_tokens import ScoredLogprobs, ScoredTokens
from engine.core.request import Request
from engine.core.schedule import SamplerOutput, SchedulerOutput, StateBlocks
from engine.core.scheduler import Scheduler, check_integrity
from engine.execution.memory.kv_caches import move_blocks
from kernels.step.sampling_columns import BEAM, LENGTH, RUNNING, SKIPPED, STOP
from tests.factories.beams import sampled_logprobs
from tests.factories.block_store import BlockStore
from tests.factories.requests import SEEDS_PER_REQUEST, VOCAB


def chain(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).digest()


def next_token(token_ids: Sequence[int], index: int) -> int:
    return (chain(token_ids)[0] + index) % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def check_output(request: Request) -> None:
    """Assert that `request` has ended with all tokens that it gets alone."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    expected = expected_output(prompt, request.max_tokens, request.index)
    assert request.token_ids[len(prompt) :].tolist() == expected


def expected_score(token_ids: Sequence[int]) -> float:
    """Return what stands for the log-probability of the last token after the others."""
    return -float(int.from_bytes(chain(token_ids)[:3], "little"))  # exact in float32


@dataclass
class Slot:
    """The device's state of a running sequence."""

    index: int
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: set[int]
    token_ids: list[int]
    tables: list[list[int]]
    num_computed_tokens: int
    num_candidates: int  # of a beam, else 0
    drafts: list[int]  # of the step
    finish_reason: int = RUNNING

    def append(self, token_id: int) -> int:
        """Append a token; end as the device does, without stop strings. Return how it ends."""
        if self.finish_reason != RUNNING:
            return SKIPPED
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.finish_reason = STOP
        elif len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens:
            self.finish_reason = LENGTH
        return self.finish_reason


MOST_INPUTS = 16  # that a block keeps: beyond the most drafts of a step


@dataclass
class State:
    """What a block of layers that keep states holds.

    Attributes:
        consumed: hash of the tokens that the state has consumed.
        inputs: of the newest tokens, drafts included, which are kept to consume them later.
    """

    consumed: bytes
    inputs: list[int]

    @classmethod
    def after(cls, token_ids: Sequence[int], num_drafts: int = 0) -> "State":
        known = token_ids[: len(token_ids) - num_drafts]
        return cls(chain(known) if known else b"", list(token_ids)[-MOST_INPUTS:])


@dataclass
class Row:
    """A row of a step."""

    slot: Slot
    num_tokens: int
    wants_token: bool

    @property
    def end(self) -> int:
        """Where its known tokens end that the step computes, or its drafts."""
        return self.slot.num_computed_tokens + self.num_tokens


class PagedOracle:
    """Runs the steps of `scheduler`, `num_ahead` of them launched before one is read."""

    def __init__(self, scheduler: Scheduler, num_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv_cache.block_size
        self.windows = scheduler.kv_cache.windows.windows
        self.num_ahead = num_ahead
        self.num_wasted_rows = 0
        self.num_computed_tokens = 0
        self.blocks = BlockStore(self.block_size)
        self._states = {NULL_BLOCK: State(b"", [])}
        self._slots: dict[int, Slot] = {}
        self.in_flight: deque[SamplerOutput] = deque()
        self._start = time.monotonic()

    def has_work(self) -> bool:
        return bool(self.scheduler.unfinished or self.in_flight)

    def step(self) -> list[Request]:
        """Run a step; return the sequences that have ended."""
        schedule = self.scheduler.schedule()
        assert schedule.total_num_tokens <= self.scheduler.max_num_batched_tokens
        if schedule.num_rows:
            self.in_flight.append(self.execute(schedule))
        finished: list[Request] = []
        if not (schedule.num_rows or self.in_flight) and self.scheduler.is_late:
            finished += self.scheduler.update(None).finished
        while len(self.in_flight) > (self.num_ahead if schedule.num_rows else 0):
            result = self.scheduler.update(self.in_flight.popleft())
            finished += result.finished
            # Each gap is since a token of the same sequence, or of the one that it continues.
            assert (result.token_gaps_s <= time.monotonic() - self._start).all()
        check_integrity(self.scheduler)
        return finished

    def run(self, max_steps: int = 2000) -> list[Request]:
        finished = []
        for _ in range(max_steps):
            if not self.has_work():
                return finished
            finished += self.step()
        raise AssertionError("the scheduler makes no progress")

    def execute(self, schedule: SchedulerOutput) -> SamplerOutput:
        move_blocks(self.blocks, schedule)
        self._write(schedule)
        rows = [
            Row(self._slots[slot], num_tokens, wants_token)
            for slot, num_tokens, wants_token in zip(
                schedule.slots.tolist(),
                schedule.num_tokens.tolist(),
                schedule.wants_token.tolist(),
                strict=True,
            )
        ]
        for row in rows:
            slot = row.slot
            if slot.finish_reason != RUNNING:
                self.num_wasted_rows += 1
                continue
            self.num_computed_tokens += row.num_tokens
            for position in range(slot.num_computed_tokens, row.end):
                content = chain([*slot.token_ids, *slot.drafts][: position + 1])
                for group in range(len(self.windows)):
                    block, offset = self._block_slot(slot, group, position)
                    block[offset] = content + bytes([group])
        if schedule.states is not None:
            self._run_states(rows, schedule.states)
        scores = None if schedule.scored is None else self._score(rows, schedule.scored)
        token_ids, reasons = [], []
        beams: list[tuple[int, list[int], int]] = []
        for row in rows:
            if row.slot.finish_reason == RUNNING:
                self._check(row)
            if row.wants_token and row.slot.num_candidates:
                beams.append((len(token_ids), list(row.slot.token_ids), row.slot.num_candidates))
            if row.wants_token:
                token_ids.append(next_token(row.slot.token_ids, row.slot.index))
            row.slot.num_computed_tokens = row.end - len(row.slot.drafts)
            if row.wants_token:
                reasons.append(row.slot.append(token_ids[-1]))
        return SamplerOutput(
            np.array(token_ids, dtype=np.int32),
            np.array(reasons, dtype=np.int32),
            sampled_logprobs(beams),
            scores,
            drafted=tuple(self._draw_behind_drafts([row.slot for row in rows])),
        )

    def _run_states(self, rows: Sequence[Row], states: StateBlocks) -> None:
        """Read the state of each row, and write it and its checkpoints; rows run in any order."""
        assert self.scheduler.kv_cache.states is not None
        pool = self.scheduler.kv_cache.states.pool
        written: dict[int, State] = {}
        read: dict[int, int] = {}
        for index, row in enumerate(rows):
            slot, start = row.slot, row.slot.num_computed_tokens
            reads, writes = int(states.reads[index]), int(states.writes[index])
            done, end = int(states.done[index]), start + int(states.kept[index])
            assert end == row.end - len(slot.drafts)
            blocks = {writes: end}
            for position, block in states.saves[index].tolist():
                if block >= 0:
                    assert done < position <= end
                    assert block not in blocks
                    blocks[block] = position
            # Also of a row that turns out to be idle: the host knows of no other blocks.
            for block, position in blocks.items():
                assert block != NULL_BLOCK
                assert not pool.is_cached(block), "a checkpoint is written"
                assert pool.ref_count(block) > 0
                assert block not in written, "two rows write a block"
                written[block] = State.after(slot.token_ids[:position])
            if reads != writes:
                read[reads] = index
            if slot.finish_reason != RUNNING:
                for block in blocks:
                    del written[block]
                continue
            written[writes] = State.after([*slot.token_ids[:end], *slot.drafts], len(slot.drafts))
            found = self._states[reads]
            assert found.consumed == State.after(slot.token_ids[:done]).consumed, (
                f"a foreign state is read at {start} from {reads}"
            )
            # The inputs may have drafts behind them that were not accepted.
            replayed = slot.token_ids[done:start]
            ends = range(len(found.inputs) + 1)
            assert not replayed or any(
                found.inputs[:last][-len(replayed) :] == replayed for last in ends
            ), f"inputs of accepted drafts are lost at {start}"
        assert not read.keys() & written.keys(), "a row reads what another writes"
        self._states |= written

    def _draw_behind_drafts(self, slots: Sequence[Slot]) -> Iterator[SamplerOutput]:
        """Draw on behind each draft that was drawn; count its KV as computed then."""
        starts = [len(slot.token_ids) - 1 for slot in slots]
        for number in range(max(len(slot.drafts) for slot in slots)):
            token_ids, reasons = [], []
            for slot, start in zip(slots, starts, strict=True):
                if number < len(slot.drafts):
                    goes_on = slot.token_ids[start:] == slot.drafts[: number + 1]
                    goes_on &= slot.finish_reason == RUNNING
                    slot.num_computed_tokens += goes_on
                    token_ids.append(next_token(slot.token_ids, slot.index) if goes_on else 0)
                    reasons.append(slot.append(token_ids[-1]) if goes_on else SKIPPED)
            yield SamplerOutput(
                np.array(token_ids, dtype=np.int32), np.array(reasons, dtype=np.int32), None
            )

    def _score(self, rows: Sequence[Row], scored: ScoredTokens) -> ScoredLogprobs:
        """Score tokens of prompts; the most likely ones are the same token again and again."""
        places = [
            (row.slot, i) for row in rows for i in range(row.slot.num_computed_tokens, row.end)
        ]
        logprobs = []
        for index, token_id in zip(
            scored.logits_indices.tolist(), scored.token_ids.tolist(), strict=True
        ):
            slot, position = places[index]
            known = slot.token_ids[: position + 2]
            assert len(known) == position + 2 <= slot.num_prompt_tokens
            assert known[-1] == token_id
            logprobs.append(expected_score(known))
        found = np.array(logprobs, dtype=np.float32)
        tops = np.tile(scored.token_ids[:, None], scored.num_top)
        return ScoredLogprobs(
            found,
            np.arange(len(found), dtype=np.int32),
            tops.astype(np.int32),
            np.tile(found[:, None], scored.num_top),
        )

    def _write(self, schedule: SchedulerOutput) -> None:
        """Change the slots as the schedule says, and compare them with the scheduler's requests."""
        new_requests, blocks = schedule.new_requests, schedule.block_writes
        assert set(new_requests.slots) <= set(blocks.slots) <= set(schedule.slots)
        for item, slot in enumerate(new_requests.slots.tolist()):
            self._slots[slot] = Slot(
                index=int(new_requests.seeds[item]) % SEEDS_PER_REQUEST,
                num_prompt_tokens=int(new_requests.num_prompt_tokens[item]),
                max_tokens=int(new_requests.max_tokens[item]),
                stop_token_ids=set(new_requests.stop_token_ids[item].tolist()),
                token_ids=new_requests.token_ids[item].tolist(),
                tables=[[] for _ in self.windows],
                num_computed_tokens=int(new_requests.num_computed_tokens[item]),
                num_candidates=(
                    int(new_requests.num_top_logprobs[item])
                    if new_requests.features[item] & BEAM
                    else 0
                ),
                drafts=[],
            )
        for item, slot in enumerate(blocks.slots.tolist()):
            start = int(blocks.starts[item])
            table = self._slots[slot].tables[blocks.groups[item]]
            assert start <= len(table)
            table[start:] = blocks.block_ids[item].tolist()
        for slot in schedule.slots.tolist():
            self._slots[slot].drafts = []
        if (drafts := schedule.drafts) is not None:
            for item, slot in enumerate(schedule.slots[drafts.rows].tolist()):
                assert len(self._slots[slot].token_ids) == drafts.starts[item]
                self._slots[slot].drafts = drafts.token_ids[item].tolist()
        running = {request.slot: request for request in self.scheduler.running}
        for row, number in enumerate(schedule.slots.tolist()):
            request, slot = running[number], self._slots[number]
            for known, table in zip(slot.tables, request.kv.tables, strict=True):
                # The device is not told which blocks have been given back.
                assert len(known) == len(table)
                assert all(b in (a, NULL_BLOCK) for a, b in zip(known, table, strict=True))
            assert slot.index == request.index
            if slot.finish_reason == RUNNING:
                num_output = len(slot.token_ids) - slot.num_prompt_tokens
                assert not schedule.wants_token[row] or (
                    schedule.num_output_tokens[row] == num_output
                )

    def _check(self, row: Row) -> None:
        slot = row.slot
        token_ids = [*slot.token_ids, *slot.drafts]
        assert row.wants_token == (row.end == len(token_ids))
        contents = [chain(token_ids[: position + 1]) for position in range(row.end)]
        for group, window in enumerate(self.windows):
            first = max(0, slot.num_computed_tokens - (window or row.end) + 1)
            for position in range(first if window else 0, row.end):
                block, offset = self._block_slot(slot, group, position)
                assert block[offset] == contents[position] + bytes([group]), (
                    f"sequence {slot} finds foreign KV of group {group} at {position}"
                )

    def _block_slot(self, slot: Slot, group: int, position: int) -> tuple[list[bytes], int]:
        block_id = slot.tables[group][position // self.block_size]
        return self.blocks.device[block_id], position % self.block_size
