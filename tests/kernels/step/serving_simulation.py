"""A simulated host that runs one step ahead of the device, with a model that hashes its history.

The model's next token depends on every token that it reads back from a simulated KV cache, through
block tables and slot mapping: any wrong index gives other tokens than plain Python.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kernels.step.sampling_columns import RUNNING, SKIPPED, STOP
from kernels.step.slot_writes import SlotWrites
from kernels.step.step_inputs import StepInputs, prepare_inputs
from kernels.step.token_scatter import scatter_tokens
from tests.kernels.slot_cases import admit, empty_tables, set_blocks
from tests.kernels.step.simulated_sequence import VOCAB, Sequence, next_token
from tests.kernels.support import DEVICE

NUM_SLOTS = 4
MAX_MODEL_LEN = 48
MAX_STOP_TOKEN_IDS = 3


@dataclass(frozen=True)
class Row:
    """A sequence's part of one step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class Host:
    """Schedules at random, and reads the tokens of a step after launching the next one."""

    def __init__(self, seed: int, *, num_sequences: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.max_blocks = -(-MAX_MODEL_LEN // block_size)
        num_blocks = 1 + NUM_SLOTS * self.max_blocks
        self.tables = empty_tables(
            NUM_SLOTS,
            max_model_len=MAX_MODEL_LEN,
            max_blocks=self.max_blocks,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        )
        self.cache = [-1] * (num_blocks * block_size)
        self.free_blocks = list(range(1, num_blocks))
        self.free_slots = list(range(NUM_SLOTS))
        self.sequences = [self._sequence() for _ in range(num_sequences)]
        self.waiting = list(self.sequences)
        self.running: list[Sequence] = []
        self.unread: list[tuple[Row, int, int]] = []  # token and reason of each sampling row
        self.num_wasted = 0
        self.out: StepInputs | None = None  # reused by steps of the same shape

    def _sequence(self) -> Sequence:
        rng = self.rng
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 16, 17, 30]))]
        max_tokens = min(rng.randint(1, 14), MAX_MODEL_LEN - len(prompt))
        if rng.random() < 0.2:
            max_tokens = MAX_MODEL_LEN - len(prompt)
        stop = rng.sample(range(VOCAB), rng.randint(0, MAX_STOP_TOKEN_IDS))
        return Sequence(prompt, rng.randint(0, min(4, max_tokens)), max_tokens, stop)

    def run(self) -> None:
        """Serve all sequences, and compare with plain Python."""
        while self.waiting or self.running or self.unread:
            writes = SlotWrites(self.tables)
            rows = self._schedule(writes)
            writes.apply()
            sampled = self._step(rows)
            for row, token_id, reason in self.unread:  # of the previous step
                self._read(row, token_id, reason)
            self.unread = sampled
        for sequence in self.sequences:
            token_ids, reason = sequence.answer()
            if sequence.cancelled:
                assert sequence.token_ids == token_ids[: len(sequence.token_ids)]
            else:
                assert (sequence.token_ids, sequence.reason) == (token_ids, reason)
        assert sorted(self.free_slots) == list(range(NUM_SLOTS))

    def _schedule(self, writes: SlotWrites) -> list[Row]:
        rng = self.rng
        if self.running and rng.random() < 0.1:
            self._preempt(rng.choice(self.running))
        while self.waiting and self.free_slots and rng.random() < 0.7:
            sequence = self.waiting[0]
            if any(row.sequence is sequence for row, *_ in self.unread):
                break  # preempted, and its last token is not known yet
            self._admit(self.waiting.pop(0), writes)
        rows, budget = [], rng.randint(4, 24)
        for sequence in self.running:
            left = sequence.num_expected_tokens - sequence.num_computed_tokens
            num_tokens = min(left, budget, rng.choice([1, 5, 40]))
            if num_tokens and rng.random() < 0.9:
                rows.append(self._row(sequence, num_tokens, writes))
                budget -= num_tokens
        rng.shuffle(rows)
        return rows

    def _admit(self, sequence: Sequence, writes: SlotWrites) -> None:
        sequence.token_ids = sequence.token_ids or list(sequence.prompt)
        sequence.num_expected_tokens = len(sequence.token_ids)
        sequence.slot = self.free_slots.pop(self.rng.randrange(len(self.free_slots)))
        # Some tokens are computed already, as after a prefix cache hit.
        num_hits = self.rng.randint(0, (len(sequence.token_ids) - 1) // self.block_size)
        sequence.num_computed_tokens = num_hits * self.block_size
        self._take_blocks(sequence, sequence.num_computed_tokens)
        for i, token_id in enumerate(sequence.token_ids[: sequence.num_computed_tokens]):
            block = sequence.block_ids[i // self.block_size]
            self.cache[block * self.block_size + i % self.block_size] = token_id
        self.running.append(sequence)
        admit(
            writes,
            sequence.slot,
            token_ids=sequence.token_ids,
            num_prompt_tokens=len(sequence.prompt),
            num_computed_tokens=sequence.num_computed_tokens,
            min_tokens=sequence.min_tokens,
            max_tokens=sequence.max_tokens,
            stop_token_ids=sequence.stop_token_ids,
            block_ids=sequence.block_ids,
            width=MAX_STOP_TOKEN_IDS,
        )

    def _take_blocks(self, sequence: Sequence, num_tokens: int) -> list[int]:
        missing = max(0, -(-num_tokens // self.block_size) - len(sequence.block_ids))
        taken = [self.free_blocks.pop() for _ in range(missing)]
        sequence.block_ids += taken
        return taken

    def _row(self, sequence: Sequence, num_tokens: int, writes: SlotWrites) -> Row:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens += num_tokens
        begin = len(sequence.block_ids)
        taken = self._take_blocks(sequence, sequence.num_computed_tokens)
        set_blocks(writes, sequence.slot, begin, taken)
        samples = sequence.num_computed_tokens == sequence.num_expected_tokens
        # The host knows the last token's index, and schedules nothing beyond it.
        if (
            samples
            and sequence.num_expected_tokens - len(sequence.prompt) < sequence.max_tokens - 1
        ):
            sequence.num_expected_tokens += 1
        return Row(sequence, start, num_tokens, samples)

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        self.waiting.append(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self.rng.shuffle(self.free_blocks)
        self.free_blocks = sequence.block_ids + self.free_blocks
        sequence.block_ids, sequence.slot = [], -1

    def _step(self, rows: list[Row]) -> list[tuple[Row, int, int]]:
        num_idle, num_padding = self.rng.choice([(0, 0), (1, 0), (2, 3), (0, 5)])
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.num_tokens)
        slots = [row.sequence.slot for row in rows] + [-1] * num_idle
        query_start_loc = starts + [starts[-1]] * num_idle
        num_tokens = starts[-1] + num_padding
        out = self.out
        if out is None or (len(out.seq_lens), len(out.token_ids)) != (len(slots), num_tokens):
            out = None
        inputs = prepare_inputs(
            self.tables,
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(query_start_loc, dtype=torch.int32, device=DEVICE),
            num_tokens,
            self.block_size,
            out=out,
        )
        assert out is None or inputs is out
        self.out = inputs
        live = self._check(rows, inputs, starts)
        answers = self._forward(inputs, len(rows))
        reasons = scatter_tokens(
            self.tables,
            inputs.sample_slots,
            torch.tensor(answers, dtype=torch.int64, device=DEVICE),
        ).tolist()
        assert reasons[len(rows) :] == [SKIPPED] * num_idle
        sampled = []
        for row, lives, token_id, reason in zip(rows, live, answers, reasons, strict=False):
            assert (reason != SKIPPED) == (lives and row.samples)
            if row.samples:
                sampled.append((row, token_id, reason))
        return sampled

    def _check(self, rows: list[Row], inputs: StepInputs, starts: list[int]) -> list[bool]:
        """Compare the inputs with the expected ones; return which rows have not ended."""
        # Tokens of the previous step, which the device knows already.
        known = {id(row.sequence): (token_id, reason) for row, token_id, reason in self.unread}
        live = []
        size = len(inputs.positions)
        positions, slot_mapping, token_ids = [0] * size, [-1] * size, [0] * size
        for i, row in enumerate(rows):
            sequence = row.sequence
            token_id, reason = known.get(id(sequence), (-1, RUNNING))
            live.append(reason == RUNNING and sequence.reason == RUNNING)
            if not live[-1]:
                self.num_wasted += 1
                continue
            history = sequence.token_ids + ([token_id] if id(sequence) in known else [])
            for j in range(row.num_tokens):
                token_idx, position = starts[i] + j, row.start + j
                positions[token_idx], token_ids[token_idx] = position, history[position]
                block = sequence.block_ids[position // self.block_size]
                slot_mapping[token_idx] = block * self.block_size + position % self.block_size
        assert inputs.positions.tolist() == positions
        assert inputs.slot_mapping.tolist() == slot_mapping
        assert inputs.token_ids.tolist() == token_ids
        num_idle = len(inputs.seq_lens) - len(rows)
        expected = [
            (row.start + row.num_tokens) * lives for row, lives in zip(rows, live, strict=True)
        ]
        assert inputs.seq_lens.tolist() == expected + [0] * num_idle
        expected = [(starts[i + 1] - 1) * lives for i, lives in enumerate(live)]
        assert inputs.logits_rows.tolist() == expected + [0] * num_idle
        expected = [
            row.sequence.slot if lives and row.samples else -1
            for row, lives in zip(rows, live, strict=True)
        ]
        assert inputs.sample_slots.tolist() == expected + [-1] * num_idle
        return live

    def _forward(self, inputs: StepInputs, num_rows: int) -> list[int]:
        """Write the step's tokens to the cache; return the model's next token of each row."""
        for token_id, slot in zip(
            inputs.token_ids.tolist(), inputs.slot_mapping.tolist(), strict=True
        ):
            if slot >= 0:
                self.cache[slot] = token_id
        answers = []
        for seq_len, block_ids in zip(
            inputs.seq_lens.tolist(), inputs.block_tables.tolist(), strict=True
        ):
            places = (
                block_ids[i // self.block_size] * self.block_size + i % self.block_size
                for i in range(seq_len)
            )
            answers.append(next_token([self.cache[slot] for slot in places]))
        return answers

    def _read(self, row: Row, token_id: int, reason: int) -> None:
        """Process a token that has arrived, as the engine does."""
        sequence = row.sequence
        if sequence.reason != RUNNING:
            return  # a wasted row: the sequence had ended a step earlier
        sequence.append(token_id)
        assert reason == sequence.reason
        if sequence.reason == RUNNING and self.rng.random() < 0.03:
            sequence.reason, sequence.cancelled = (
                STOP,
                True,
            )  # a stop string, which only the host detects
        if sequence.reason != RUNNING:
            if sequence in self.running:
                self._give_back(sequence)
            else:
                self.waiting.remove(sequence)
