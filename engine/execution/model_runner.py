"""ModelRunner: owns the weights, the KV cache and the slot tables, and runs the scheduled steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.schedule import SamplingBatch, SchedulerOutput
from engine.execution.attention.backend import AttentionBackend
from engine.execution.devices import ResolvedConfig
from engine.execution.downloads import Download, Downloads
from engine.execution.graphs.captured_steps import CapturedSteps, measured_sizes, run_padding
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.step_graphs import Capturer
from engine.execution.memory.kv_cache_plan import kv_cache_dtype
from engine.execution.memory.kv_caches import (
    allocate_host_cache,
    allocate_kv_cache,
    allocate_state_caches,
    caches_by_layer,
    distinct_caches,
    move_blocks,
)
from engine.execution.memory.step_memory import with_memory
from engine.execution.pending_step import ForwardResults, PendingStep, PromptResults
from engine.execution.sampler import Drawn, RankSampler, SamplePlan, Sampler
from engine.execution.slot_writes import allocate_tables, slot_writes
from engine.execution.spec_decode import DraftedSteps
from engine.execution.warm_up import warm_up_sampling, warm_up_steps
from engine.layers.attention import LayerCache
from engine.layers.moe import MoE
from engine.layers.rank_group import RankGroup
from engine.models.batch import Batch
from engine.models.causal_lm import CausalLM
from engine.models.kv_groups import KVGroups
from engine.nvtx import nvtx_range
from kernels.block_copy import BlockCopier
from kernels.sampling.logprobs import Logprobs, token_logprobs
from kernels.state.states import StateCache, StepStates
from kernels.step.step_inputs import StepInputs, prepare_inputs
from kernels.step.token_scatter import scatter_tokens
from kernels.step.upload import upload, upload_together


class ExpertCounts:
    """Reads the counters of a model's mixtures without waiting for the device."""

    def __init__(self, model: nn.Module, downloads: Downloads) -> None:
        """Read those of `model`, which may have none."""
        self._totals: list[Tensor] = [
            module.expert_totals for module in model.modules() if isinstance(module, MoE)
        ]
        self._downloads = downloads
        self._download: Download | None = None

    @torch.inference_mode()
    def read(self) -> NDArray[Any] | None:
        """Return int64 [mixtures, experts], the choices up to the call before this one.

        None at the first call, and for a model without mixtures.
        """
        if not self._totals:
            return None
        found = None if self._download is None else self._download.wait()[0]
        self._download = self._downloads.start([torch.stack(self._totals)])
        return found


def score_tokens(
    scored: ScoredTokens,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    *,
    max_rows: int,
) -> list[Tensor]:
    """Return the columns of `ScoredLogprobs`, on the device, without waiting for it.

    Args:
        hidden: [T, hidden_size], of the tokens of the step in the order of its rows.
        compute_logits: float32 [R, V] of R hidden states.
        max_rows: the logits of no more tokens exist at any time.
    """
    columns = upload_together((scored.logits_indices, scored.token_ids), hidden.device)
    indices, token_ids = (torch.split(column, max_rows) for column in columns)

    def find(indices: Tensor, token_ids: Tensor) -> Logprobs:
        logits = compute_logits(hidden.index_select(0, indices))
        return token_logprobs(logits, token_ids.long(), min(scored.num_top, logits.shape[1]))

    found = map(find, indices, token_ids)
    chosen, ranks, top_token_ids, top_logprobs = map(torch.cat, zip(*found, strict=True))
    return [chosen, ranks, top_token_ids.int(), top_logprobs]


class ModelRunner:
    """Executes the model on one device; independent of queues and clients.

    The tokens of the running sequences are stored on the device: a step appends to them, and the
    next one can be launched before the host has seen them.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        config: ResolvedConfig,
        *,
        groups: KVGroups,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        rank_group: RankGroup | None = None,
    ) -> None:
        """Run `model`, which computes in `dtype` on `device`, with `attention`.

        Args:
            groups: how its layers share blocks of the KV cache.
            rank_group: that of `model`, if it is one rank's part.
        """
        self.model = model
        self.device = device
        self._attention = attention
        self._config = config
        self._groups = groups
        self._dtype = dtype
        self._downloads = Downloads(device)
        self._expert_counts = ExpertCounts(model, self._downloads)
        self._kv_cache: list[LayerCache] = []  # of the layers with attention
        self._layer_caches: list[LayerCache | StateCache] = []  # of all layers
        self._block_copier: BlockCopier | None = None  # of the KV cache
        self._graphs: CapturedSteps | None = None
        # A step that waits for its sampling.
        self._launched: tuple[SchedulerOutput, ForwardResults] | None = None
        vocab_size = model.spec.vocab_size
        self._tables = allocate_tables(
            config,
            vocab_size,
            max_model_len,
            device,
            num_groups=len(groups.windows),
            keeps_states=bool(model.spec.state_shapes),
        )
        self._rank_group = rank_group
        self._sampler = (
            Sampler(self._tables, vocab_size)
            if rank_group is None
            else RankSampler(self._tables, vocab_size, rank_group)
        )
        self._drafted = DraftedSteps(model, self._tables, self._sampler, self._downloads)

    def allocate_kv_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Allocate the KV cache, `num_blocks` blocks in every layer, in place of an earlier one.

        Likewise `num_states` blocks in every layer that keeps states.
        """
        # Before the new one: there may be no room for both.
        self._kv_cache, self._layer_caches, self._block_copier = [], [], None
        model = self.model.spec
        self._kv_cache = allocate_kv_cache(
            num_blocks,
            self._config.block_size,
            groups=self._groups,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=kv_cache_dtype(self._config, self._dtype),
            device=self.device,
        )
        self._block_copier = BlockCopier(self._caches)
        states = allocate_state_caches(
            num_states, model.state_shapes, dtype=self._dtype, device=self.device
        )
        self._layer_caches = caches_by_layer(model.layers, self._kv_cache, states)

    def allocate_swap_space(self, num_bytes: int) -> int:
        """Allocate blocks of the host for swaps, within `num_bytes`; return how many there are.

        The KV cache must be allocated.
        """
        host_caches = allocate_host_cache(self._caches, num_bytes)
        num_blocks = len(host_caches[0])
        if num_blocks:
            self._block_copier = BlockCopier(self._caches, host_caches)
        return num_blocks

    @property
    def _caches(self) -> list[Tensor]:
        """The keys and values of all layers."""
        return distinct_caches(self._kv_cache)

    def expert_counts(self) -> NDArray[Any] | None:
        """Return how often each expert was chosen, as `ExpertCounts.read`."""
        return self._expert_counts.read()

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors on the device that steps change, by name."""
        named = {f"KV cache {i}": cache for i, cache in enumerate(self._caches)}
        states = (cache for cache in self._layer_caches if isinstance(cache, StateCache))
        parts = (part for cache in states for part in cache if part is not None)
        named |= {f"states {i}": part for i, part in enumerate(parts)}
        return {**named, "slot tables": self._tables.buffer, **self._sampler.state}

    @torch.inference_mode()
    def run_decode_step(self, num_rows: int) -> None:
        """Run a decode step of padding, to time it without attention."""
        hidden, _ = run_padding(self._forward, num_rows, num_rows, num_rows, self.device)
        self.model.compute_logits(hidden)

    def warm_up(self) -> None:
        """Run the largest step, and launch all kernels that requests can reach, to compile them.

        Only the null block must be allocated, and no sequence may have a slot.
        """
        num_words = self._tables.allowed_tokens.shape[1]
        length, num_groups = self._tables.max_model_len, self._tables.num_groups
        for number, step in enumerate(warm_up_steps(self._config, length, num_groups)):
            # With masks for all rows of the largest step, and without: different kernels.
            num_rows = 0 if number else step.num_rows
            self.forward(step)
            self.sample(warm_up_sampling(num_rows, num_words, self.model.spec.vocab_size)).wait()
        assert self._block_copier is not None
        self._block_copier.warm_up()
        self._sampler.free_penalty_counts()

    @cached_property
    @torch.inference_mode()
    def graph_sizes(self) -> GraphSizes:
        """For which steps graphs are captured; measured once, when the KV cache is allocated."""
        config = self._config
        most = config.max_num_batched_tokens
        agree = self._rank_group.first if self._rank_group is not None else int
        return measured_sizes(self._forward, config.max_num_seqs, most, self.device, agree)

    @torch.inference_mode()
    def capture_graphs(
        self,
        capturer: Capturer,
        on_progress: Callable[[int, int], None],
        sizes: GraphSizes | None = None,
    ) -> int:
        """Capture steps of `sizes`, by default of all; return the number of graphs.

        The KV cache must be allocated. `on_progress` is called with (captured, total).

        Raises:
            InsufficientMemoryError: there is no memory left for them.
        """
        shape = (self._config.max_num_seqs, self.model.spec.hidden_size)
        self._graphs = CapturedSteps(
            self._forward,
            # Rank 0 alone knows whether a step's sampling is plain: all ranks do it by launches.
            self.model.compute_logits if self._rank_group is None else None,
            capturer,
            self._tables,
            hidden=torch.zeros(shape, dtype=self._dtype, device=self.device),
            sizes=sizes or self.graph_sizes,
            on_progress=on_progress,
        )
        return self._graphs.num_graphs

    def drop_graphs(self) -> None:
        """Free the graphs and their memory."""
        self._graphs = None
        torch.cuda.empty_cache()

    @nvtx_range("forward")
    def forward(self, schedule: SchedulerOutput) -> None:
        """Launch the forward pass of a step with at least one row, without waiting for it.

        Raises:
            StepOutOfMemoryError: the device has no memory for it. Other sequences than those of the
                step are unharmed, and steps in flight go on.
        """
        self._sampler.admit(schedule.new_requests)
        results = with_memory(schedule, self.device, partial(self._run_forward, schedule))
        self._launched = schedule, results

    @nvtx_range("sample")
    def sample(self, sampling: SamplingBatch) -> PendingStep:
        """Launch the sampling of the step whose forward pass was launched last.

        Raises:
            StepOutOfMemoryError: as from `forward`.
        """
        assert self._launched is not None
        (schedule, results), self._launched = self._launched, None
        if schedule.drafts is not None:
            run = partial(self._drafted.draw, schedule, sampling, results)
        else:
            run = partial(self._run_sample, results, self._sampler.plan(schedule, sampling))
        return with_memory(schedule, self.device, run)

    @torch.inference_mode()
    def _run_forward(self, schedule: SchedulerOutput) -> ForwardResults:
        assert self._block_copier is not None
        move_blocks(self._block_copier, schedule)
        num_rows, num_tokens = schedule.num_rows, schedule.total_num_tokens
        captured = None
        if self._graphs is not None and schedule.scored is None:
            captured = self._graphs.forward.find(num_rows, num_tokens, schedule.num_decodes)
        if captured is not None:
            num_rows = captured.num_rows
        slot_writes(schedule, self._tables, num_rows).apply()
        if captured is not None:
            last, sample_slots = captured.run()
            prompts = PromptResults(hidden=self._embedded(schedule, last))
            return ForwardResults(last, sample_slots, in_graph=True, prompts=prompts)
        slots = self._tables.step_slots[:num_rows]
        query_start_loc = self._tables.query_start_loc[: num_rows + 1]
        hidden, inputs = self._compute(slots, query_start_loc, num_tokens, schedule.num_decodes)
        found = None if schedule.scored is None else self._score(schedule.scored, hidden)
        last = hidden[inputs.logits_rows]
        prompts = PromptResults(found, self._embedded(schedule, last))
        kept = last if schedule.drafts is None else hidden
        return ForwardResults(kept, inputs.sample_slots, in_graph=False, prompts=prompts)

    def _score(self, scored: ScoredTokens, hidden: Tensor) -> Download | None:
        """Find log-probabilities of prompt tokens; other ranks only give their part of the logits.

        Args:
            hidden: of all tokens of the step.
        """
        compute_logits = self.model.compute_logits
        most = self._config.max_num_seqs  # rows of logits, for which memory is reserved
        if self.model.spec.rank:
            for rows in torch.split(upload(scored.logits_indices, self.device), most):
                compute_logits(hidden.index_select(0, rows))
            return None
        return self._downloads.start(score_tokens(scored, hidden, compute_logits, max_rows=most))

    def _embedded(self, schedule: SchedulerOutput, last: Tensor) -> Download | None:
        """Copy those of the `last` hidden states of the rows to the host that are wanted there."""
        if schedule.embedded is None:
            return None
        rows = upload(schedule.embedded, self.device)
        return self._downloads.start([last.index_select(0, rows).float()])

    @torch.inference_mode()
    def _run_sample(self, forward: ForwardResults, plan: SamplePlan) -> PendingStep:
        hidden, slots, in_graph, prompts = forward
        num_rows = len(plan.wants_token)
        # Without a row that wants a token nothing is launched but the copy to wait for.
        graphs = None if self._graphs is None else self._graphs.sampling
        if graphs is not None and in_graph and plan.is_plain and num_rows:
            packed = graphs.run(num_rows, has_filters=plan.has_filters)
            return PendingStep(plan, self._downloads.copy(packed), prompts)
        logits, slots = self.model.compute_logits(hidden[:num_rows]), slots[:num_rows]
        return self._scatter(plan, self._sampler.sample(plan, logits, slots), slots, prompts)

    def _forward(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the tokens of a step; return the last hidden state and the slot of each row.

        The slot is -1 where no token is to be sampled.
        """
        hidden, inputs = self._compute(slots, query_start_loc, num_tokens, num_decodes)
        return hidden[inputs.logits_rows], inputs.sample_slots

    def _compute(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, StepInputs]:
        """Compute the tokens of a step; return the hidden state of each, and what it was given."""
        inputs = self._prepare_inputs(slots, query_start_loc, num_tokens)
        batch = Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            num_decodes=num_decodes,
            num_groups=self._tables.num_groups,
            states=self._step_states(query_start_loc, inputs.seq_lens, num_tokens, num_decodes),
        )
        return self.model(batch, self._layer_caches, self._attention.plan(batch)), inputs

    def _step_states(
        self, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, num_decodes: int | None
    ) -> StepStates | None:
        if not self.model.spec.state_shapes:
            return None
        tables, num_rows = self._tables, len(seq_lens)
        states = StepStates(
            query_start_loc,
            seq_lens,
            tables.state_reads[:num_rows],
            tables.state_writes[:num_rows],
            tables.state_saves[:num_rows],
        )
        return states.indexed(num_tokens, num_decodes or 0)

    @nvtx_range("prepare inputs")
    def _prepare_inputs(self, slots: Tensor, starts: Tensor, num_tokens: int) -> StepInputs:
        return prepare_inputs(self._tables, slots, starts, num_tokens, self._config.block_size)

    @nvtx_range("scatter")
    def _scatter(
        self, plan: SamplePlan, drawn: Drawn, slots: Tensor, prompts: PromptResults
    ) -> PendingStep:
        finish_reasons = scatter_tokens(self._tables, slots, drawn.token_ids)
        return PendingStep.of(plan, drawn, finish_reasons, self._downloads, prompts)
