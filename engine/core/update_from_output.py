"""OutputUpdater: updates the sequences with the tokens that a step has sampled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.mask_workers import Drawn, MaskWorkers
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.logprobs.prompt_scores import PromptScores
from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.ragged import ragged
from engine.core.request import FinishReason, Request
from engine.core.schedule import ForcedTokens, SamplerOutput, SchedulerOutput
from engine.core.seq_slots import SeqSlots
from engine.protocol.messages import TokenLogprobs
from engine.text.byte_sets import ByteSets
from kernels.step.sampling_columns import RUNNING, SKIPPED

_MAX_WAIT_S = 0.005  # that arrivals may wait while nothing but grammars is to be waited for
# By the device's finish reason of a row: RUNNING, STOP or LENGTH.
_FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")

# So that no step waits long for others: tokens of one sequence, and the time of all sequences after
# which the rest of them sample the next token instead, which costs a forward pass and is the same.
_MAX_FORCED_TOKENS = 4096
_MAX_FORCING_S = 0.05


class _Rows(NamedTuple):
    """The rows of a step that sample a token, or that do behind a draft.

    Attributes:
        slots: int32 [R].
        serials: int64 [R], of their owners.
        is_embedded: bool [R], those whose hidden state is wanted.
    """

    slots: NDArray[np.int32]
    serials: NDArray[np.int64]
    is_embedded: NDArray[np.bool_]

    def one(self, row: int) -> _Rows:
        """Return the row at `row` alone."""
        part = slice(row, row + 1)
        return _Rows(self.slots[part], self.serials[part], self.is_embedded[part])


@dataclass(slots=True)
class UpdateResult:
    """The sequences that got a token from one step.

    Attributes:
        slots: int32 [N], of the sequences that neither finished nor need host checks.
        examined: the others: finished, or checked by the host.
        begun: those that got their first token.
        token_gaps_s: float64 [M], of those with earlier tokens, the time since the last one.
        num_forced: tokens that came with these, without a step of their own.
        num_drafts: sequences with draft tokens in the step.
        num_draft_tokens, num_accepted_tokens: draft tokens proposed and accepted.
    """

    slots: NDArray[np.int32]
    examined: list[Request]
    begun: list[Request]
    token_gaps_s: NDArray[np.float64]
    num_forced: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def empty(cls) -> UpdateResult:
        """Return the result of a step without sequences."""
        return cls(np.zeros(0, np.int32), [], [], np.zeros(0, np.float64))

    def add_others(self, others: UpdateResult) -> None:
        """Add sequences that are not among these."""
        self.slots = np.concatenate([self.slots, others.slots])
        self.examined += others.examined
        self.begun += others.begun
        self.token_gaps_s = np.concatenate([self.token_gaps_s, others.token_gaps_s])
        self.num_forced += others.num_forced

    def add(self, drawn: UpdateResult | None, num_drafts: int) -> None:
        """Add the tokens that were `drawn` behind `num_drafts` drafts, one or none of each."""
        self.num_drafts = max(self.num_drafts, num_drafts)  # each has a first one
        self.num_draft_tokens += num_drafts
        if drawn is None:
            return
        self.num_accepted_tokens += len(drawn.token_gaps_s)
        self.examined = list(dict.fromkeys([*self.examined, *drawn.examined]))
        apart = {request.slot for request in self.examined}
        slots = np.union1d(self.slots, drawn.slots)
        self.slots = slots[[slot not in apart for slot in slots.tolist()]]
        self.token_gaps_s = np.concatenate([self.token_gaps_s, drawn.token_gaps_s])

    @property
    def finished(self) -> list[Request]:
        """Those that have ended with their token."""
        return [request for request in self.examined if request.finish is not None]


@dataclass(slots=True)
class _Late:
    """The token of one row whose grammar has not followed it yet: it counts as unread."""

    row: _Rows
    sample: SamplerOutput
    drawn: Drawn


class OutputUpdater:
    """Appends sampled tokens to their sequences, and drops those whose slot has a new owner.

    A token of a sequence with a grammar is read when the grammar has followed it, maybe some steps
    later: until then the sequence takes part in none, as its next token depends on that.

    Attributes:
        scorer: takes the log-probabilities of prompts.
    """

    def __init__(
        self,
        states: SeqSlots,
        kv_cache: KVCacheManager,
        token_bytes: ByteSets,
        mask_workers: MaskWorkers,
    ) -> None:
        """Read the tokens of the sequences in `states`, and commit the blocks that they fill.

        Args:
            token_bytes: `TokenFlags.byte_sets`.
            mask_workers: where grammars follow the tokens.
        """
        self._token_bytes = token_bytes
        self._states = states
        self._kv_cache = kv_cache
        self.scorer = PromptScorer()
        self._jump_forward = JumpForward(states, vocab_size=len(token_bytes))
        # Of each step, those that sample a token, then those behind the first drafts, and so on.
        self._in_flight: deque[list[_Rows]] = deque()
        # Of each step, the slots whose rows write checkpoints of states, by serial, and where.
        self._saves: deque[list[tuple[int, int, list[int]]]] = deque()
        self._mask_workers = mask_workers
        self._late: list[_Late] = []

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight, or a token waits for its grammar."""
        return bool(self._in_flight or self._late)

    @property
    def is_late(self) -> bool:
        """Whether a token waits for its grammar."""
        return bool(self._late)

    def launch(self, schedule: SchedulerOutput) -> SchedulerOutput:
        """Note the next step; return it with what it finds of prompts, and the forced tokens."""
        slots = schedule.slots[schedule.wants_token]
        is_embedded = self._states.wants_embedding[slots]
        first = _Rows(slots, self._states.serial[slots], is_embedded)
        self._in_flight.append([first, *self._drafted(schedule)])
        self._saves.append(list(self._saved(schedule)))
        if is_embedded.any():
            rows = schedule.wants_token.nonzero()[0][is_embedded]
            schedule = replace(schedule, embedded=rows.astype(np.int32))
        return self.scorer.launch(self._jump_forward.launch(schedule))

    def _saved(self, schedule: SchedulerOutput) -> Iterator[tuple[int, int, list[int]]]:
        if schedule.states is None:
            return
        positions = schedule.states.saves[:, :, 0]
        for row in (positions[:, 0] > 0).nonzero()[0].tolist():
            slot = int(schedule.slots[row])
            found = [position for position in positions[row].tolist() if position > 0]
            yield slot, int(self._states.serial[slot]), found

    def _name_states(self) -> None:
        """Let the checkpoints be found that the oldest step has written, of those that still run.

        A sequence that had ended before the step had no part in it.
        """
        for slot, serial, positions in self._saves.popleft():
            if self._states.is_owned(slot, serial):
                self._kv_cache.prefix_cache.name_states(self._states.owner(slot), positions)

    def _drafted(self, schedule: SchedulerOutput) -> Iterator[_Rows]:
        """Yield the rows with a first draft, those with a second one, and so on."""
        if (drafts := schedule.drafts) is not None:
            for number in range(1, drafts.most + 1):
                slots = schedule.slots[drafts.reaching(number)[0]]
                yield _Rows(slots, self._states.serial[slots], np.zeros(len(slots), np.bool_))

    def cancel(self) -> None:
        """Forget the newest step, which is never read; its sequences still have their slots."""
        for rows in self._in_flight.pop():
            self._states.num_unread_tokens[rows.slots] -= 1
        self._saves.pop()
        self.scorer.cancel()

    def update_from_output(self, samples: SamplerOutput | None) -> UpdateResult:
        """Take the tokens of the oldest step in flight; those of sequences without slot are lost.

        These have ended, or were preempted: then the token is drawn again, from the same seed.

        Args:
            samples: None: no step is in flight; wait for a grammar.
        """
        result, late = UpdateResult.empty(), self._late
        self._late = []
        if samples is None:
            self._mask_workers.wait_for_any(_MAX_WAIT_S)
        else:
            self._name_states()
            self.scorer.read(samples)  # before the first token, which goes out with what it finds
            first, *drafted = self._in_flight.popleft()
            result = self._read(first, samples)
            for rows, drawn in zip_longest(drafted, samples.drafted):
                self._take_drafted(rows, drawn, result)
        for each in late:
            is_owned = self._are_owned(each.row)
            if is_owned.any() and not each.drawn.is_ready:
                self._late.append(each)
            elif is_owned.any():
                result.add_others(self._take(each.row, each.sample, is_owned))
        return result

    def _read(self, rows: _Rows, samples: SamplerOutput) -> UpdateResult:
        """Take the tokens of `rows`, but those that their grammars have not followed in time."""
        is_owned = self._are_owned(rows)
        drawn = self._drawn(rows, samples, is_owned)
        if not drawn:
            return self._take(rows, samples, is_owned)
        self._mask_workers.begin([*drawn.values()])
        follows = np.zeros_like(is_owned)
        follows[[*drawn]] = True
        # While the grammars follow theirs.
        result = self._take(rows, samples, is_owned & ~follows)
        self._mask_workers.wait()
        for row, each in drawn.items():
            if not each.is_ready:
                follows[row] = False
                self._late.append(_Late(rows.one(row), samples.row(row), each))
        result.add_others(self._take(rows, samples, follows))
        return result

    def _drawn(
        self, rows: _Rows, samples: SamplerOutput, is_owned: NDArray[np.bool_]
    ) -> dict[int, Drawn]:
        """Return the tokens that grammars have to follow, by their index in `rows`."""
        states, drawn = self._states, {}
        for row in (is_owned & states.has_grammar[rows.slots]).nonzero()[0].tolist():
            slot, token_id = int(rows.slots[row]), int(samples.token_ids[row])
            reason = _FINISH_REASONS[samples.finish_reasons[row]]
            grammar = states.owner(slot).grammar_of(token_id, reason)
            if grammar is not None and grammar.needs_advance(token_id):
                is_wanted = partial(states.is_owned, slot, int(rows.serials[row]))
                drawn[row] = Drawn(grammar, token_id, is_wanted)
        return drawn

    def _are_owned(self, rows: _Rows) -> NDArray[np.bool_]:
        """Whether the sequences of `rows` still have their slots."""
        owned: NDArray[np.bool_] = self._states.serial[rows.slots] == rows.serials
        return owned

    def _take_drafted(
        self, rows: _Rows, samples: SamplerOutput | None, result: UpdateResult
    ) -> None:
        """Take the tokens behind drafts that were drawn, and add them to `result`.

        What was computed for the other drafts is void, and for those after the end of a sequence.

        Args:
            samples: None: none of these drafts was drawn.
        """
        states, is_owned = self._states, self._are_owned(rows)
        is_drawn = np.zeros_like(is_owned)
        if samples is not None:
            owners = [states.requests[slot] for slot in rows.slots.tolist()]
            goes_on = [each is not None and each.finish is None for each in owners]
            is_drawn = is_owned & goes_on & (samples.finish_reasons != SKIPPED)
        void = rows.slots[is_owned & ~is_drawn]
        states.num_unread_tokens[void] -= 1
        states.num_computed_tokens[void] -= 1
        for slot in rows.slots[is_owned].tolist():
            states.owner(slot).num_draft_tokens += 1
        for slot in rows.slots[is_drawn].tolist():
            states.owner(slot).num_accepted_draft_tokens += 1
        drawn = None if samples is None else self._take(rows, samples, is_drawn)
        result.add(drawn, len(rows.slots))

    def _take(
        self, rows: _Rows, samples: SamplerOutput, is_owned: NDArray[np.bool_]
    ) -> UpdateResult:
        """Take the tokens of those `rows` whose sequences own them."""
        now, states = time.monotonic(), self._states
        slots, _, is_embedded = rows
        if samples.hidden is not None:
            for hidden, slot in zip(
                samples.hidden[is_owned[is_embedded]], slots[is_embedded & is_owned], strict=True
            ):
                states.owner(slot).output.hidden = hidden
        indices = is_owned.nonzero()[0]
        slots = slots[indices]
        token_ids, ended = samples.token_ids[indices], samples.finish_reasons[indices]
        # Before the token, because its own KV is computed only if it is not the last.
        position = states.num_tokens[slots]
        self._commit(slots, position)
        states.token_ids[slots, position] = token_ids
        states.num_tokens[slots] = position + 1
        states.num_unread_tokens[slots] -= 1
        is_first = position == states.num_prompt_tokens[slots]
        gaps = now - states.last_token_time[slots[~is_first]]
        states.last_token_time[slots] = now
        begun = [states.owner(slot) for slot in slots[is_first].tolist()]
        for request in begun:
            request.times.first_token = now
        if samples.logprobs is not None:
            logprobs = token_logprobs(samples)
            for slot, row in zip(slots.tolist(), indices.tolist(), strict=True):
                if row in logprobs:
                    states.owner(slot).output.add_logprobs(logprobs[row])
        is_examined = (ended != RUNNING) | states.is_watched[slots]
        searched = states.has_stop_strings[slots].nonzero()[0]
        if len(searched):
            found = self._token_bytes[token_ids[searched]] & states.watched_bytes[slots[searched]]
            is_examined[searched] |= found.any(axis=1)
        examined, num_forced = [], 0
        for i in is_examined.nonzero()[0].tolist():
            request = states.owner(slots[i])
            reason = _FINISH_REASONS[ended[i]]
            request.examine(int(token_ids[i]), reason)
            if request.takes_forced_tokens:
                num_forced += self._jump_forward.append(request)
            if request.thinking is not None:
                states.host_chooses[slots[i]] = request.host_chooses
            if request.output.stop_checker is not None:
                states.watched_bytes[slots[i]] = request.output.stop_checker.watch
            examined.append(request)
        return UpdateResult(slots[~is_examined], examined, begun, gaps, num_forced)

    def _commit(self, slots: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Enter the blocks in the prefix cache that are full with the tokens known so far."""
        if self._kv_cache.prefix_cache.enabled:
            is_full = num_tokens % self._kv_cache.block_size == 0
            for i in is_full.nonzero()[0].tolist():
                self._kv_cache.prefix_cache.commit(self._states.owner(slots[i]), int(num_tokens[i]))


class JumpForward:
    """Appends the tokens that grammars leave no choice about, without a forward pass for each.

    The next step computes them together, as a chunk of a prompt.
    """

    def __init__(self, states: SeqSlots, *, vocab_size: int) -> None:
        """Append tokens to the sequences in `states`, with `vocab_size` logits per token."""
        self._states = states
        self._vocab_size = vocab_size
        self._spent_s = 0.0  # in this step
        # By slot: its serial, and the number of tokens that the device knows.
        self._known: dict[int, tuple[int, int]] = {}

    def append(self, request: Request) -> int:
        """Append what must follow the newest token of a running sequence; return how much.

        The sequence may end with it, or with an error of the grammar.
        """
        start, slot = request.num_tokens, request.slot
        assert slot is not None
        if request.finish is None and self._spent_s < _MAX_FORCING_S:
            began = time.monotonic()
            for token_id in request.forced_tokens()[:_MAX_FORCED_TOKENS]:
                if token_id >= self._vocab_size:
                    break  # the model cannot go on: that is found when it should
                request.force(token_id)
                if request.finish is not None:
                    break
            self._spent_s += time.monotonic() - began
        num_forced = request.num_tokens - start
        if num_forced and request.finish is None:
            self._known[slot] = int(self._states.serial[slot]), start
        return num_forced

    def launch(self, schedule: SchedulerOutput) -> SchedulerOutput:
        """Return the next step with the tokens that were appended since the one before."""
        self._spent_s = 0.0
        if not self._known:
            return schedule
        states = self._states
        known = {
            slot: start
            for slot, (serial, start) in self._known.items()
            if states.serial[slot] == serial  # else it ended, or is admitted with all its tokens
        }
        self._known = {}
        if not known:
            return schedule
        forced = ForcedTokens(
            slots=np.array([*known], dtype=np.int32),
            starts=np.array([*known.values()], dtype=np.int32),
            token_ids=ragged(
                [
                    states.token_ids[slot, start : states.num_tokens[slot]]
                    for slot, start in known.items()
                ]
            ),
        )
        return replace(schedule, forced=forced)


def token_logprobs(samples: SamplerOutput) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of sampled tokens, by row of `samples`, of those that ask."""
    found = samples.logprobs
    if found is None:
        return {}
    columns = zip(
        found.rows.tolist(),
        samples.token_ids[found.rows].tolist(),
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.num_top.tolist(),
        found.top_token_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    )
    return {
        row: TokenLogprobs(
            token_ids=[token_id, *top_ids[:num_top]],
            logprobs=[logprob, *top_logprobs[:num_top]],
            ranks=[rank, *range(1, num_top + 1)],
        )
        for row, token_id, logprob, rank, num_top, top_ids, top_logprobs in columns
    }


class PromptScorer:
    """Finds the log-probabilities of prompts in the steps that compute them.

    Each token is scored once, however the steps of its prompt are cut.

    What a step in flight scores is delivered even if its sequence is preempted meanwhile: then the
    tokens are computed again, but not scored.
    """

    def __init__(self) -> None:
        """Begin without sequences and steps."""
        self._running: dict[int, tuple[Request, PromptScores]] = {}  # by slot, with tokens to score
        # Of each step in flight, whose tokens it scores, and how many of each.
        self._in_flight: deque[list[tuple[PromptScores, int]]] = deque()

    def add(self, request: Request) -> None:
        """Note that `request` has got a slot."""
        scores = request.prompt_scores
        if scores is not None and not scores.is_scheduled:
            assert request.slot is not None
            self._running[request.slot] = request, scores

    def launch(self, schedule: SchedulerOutput) -> SchedulerOutput:
        """Return the next step with the tokens that it scores, and note that it will be read."""
        taken: list[tuple[PromptScores, int]] = []
        self._in_flight.append(taken)
        if self._running:  # those that have given up their slots are forgotten
            self._running = {s: each for s, each in self._running.items() if each[0].slot == s}
        if not self._running:
            return schedule
        logits_indices, token_ids = [], []
        row_ends = np.cumsum(schedule.num_tokens)
        for row in np.flatnonzero(np.isin(schedule.slots, list(self._running))).tolist():
            slot, num_tokens = int(schedule.slots[row]), int(schedule.num_tokens[row])
            request, scores = self._running[slot]
            end = request.num_prompt_tokens + int(schedule.num_output_tokens[row])
            start, stop = scores.num_scheduled, min(end, scores.num_tokens)
            assert end - num_tokens <= start, "a token would not be scored"
            if start >= stop:
                continue  # computed again
            logits_indices.append(np.arange(start, stop) + (row_ends[row] - end))
            token_ids.append(request.token_ids[start + 1 : stop + 1])
            taken.append((scores, stop - start))
            scores.num_scheduled = stop
            if scores.is_scheduled:
                del self._running[slot]
        if not taken:
            return schedule
        scored = ScoredTokens(
            logits_indices=np.concatenate(logits_indices).astype(np.int32),
            token_ids=np.concatenate(token_ids),
            num_top=max(scores.num_top for scores, _ in taken),
        )
        return replace(schedule, scored=scored)

    def cancel(self) -> None:
        """Forget the newest step, whose sequences must be aborted."""
        self._in_flight.pop()

    def read(self, samples: SamplerOutput) -> None:
        """Take what the oldest step in flight has found."""
        start = 0
        for scores, count in self._in_flight.popleft():
            assert samples.prompt_logprobs is not None
            scores.append(samples.prompt_logprobs, start, start + count)
            start += count
