"""Layers that keep states, in one operation with attention: as one by one, and deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config.setting_types import Quantization
from engine.execution.attention.backend import attention_backend
from engine.execution.memory.kv_caches import (
    allocate_kv_cache,
    allocate_state_caches,
    caches_by_layer,
)
from engine.layers.rope import DefaultRope
from engine.layers.state_mixer import DeltaNet
from engine.models import process_weights
from engine.models.build import build_model
from engine.models.decoder import FusedLayers
from engine.models.kv_groups import KVGroups
from engine.models.process_weights import WeightProcessor, check_deterministic
from engine.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    Gated,
    LayerSpec,
    Mixer,
    ModelSpec,
    MoE,
    NormSpec,
)
from engine.models.tensor_names import LLAMA_NAMES
from engine.weights.dummy import fill_with_random_weights
from kernels.cpu import linear as cpu_gemm
from kernels.state.states import StepStates
from tests.factories.batches import BatchRow, build_batch
from tests.factories.forms import runs_panels

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16),
    reason="this CPU has no GEMM of ours, or the kernels are not built",
)

CPU = torch.device("cpu")
HIDDEN = 64
LENGTH = 150
TOKENS = [(7 * i + i // 3) % 160 for i in range(LENGTH)]
BLOCK_SIZE = 4
NUM_STATES = 40


@pytest.fixture(autouse=True)
def own_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have our GEMM serve where oneDNN's is faster, too."""
    monkeypatch.setattr(cpu_gemm, "serves", cpu_gemm.runs)


def spec_of(mixers: Sequence[Mixer], norm: NormSpec, mlp: Gated | MoE | None = None) -> ModelSpec:
    return ModelSpec(
        architecture="test",
        vocab_size=160,
        hidden_size=HIDDEN,
        layers=tuple(LayerSpec(mixer, mlp or Gated(96), norm) for mixer in mixers),
        norm=norm,
        context_length=LENGTH,
        dtype="float32",
        tie_word_embeddings=True,
        eos_token_ids=(),
        tensor_names=LLAMA_NAMES,
    )


def attention(norm: NormSpec, head_dim: int = 16, **settings: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rope": DefaultRope(10000.0),
        "rotary_dim": head_dim,
        "qk_norm": norm,
    }
    return AttentionSpec(**{**fields, **settings})


PLAIN, ZERO_CENTRED = NormSpec("rms", 1e-5), NormSpec("rms", 1e-6, unit_offset=True)
CONV = ConvSpec(HIDDEN, 3)
DELTA = DeltaSpec(2, 4, key_dim=24, value_dim=20, kernel=4, norm_eps=1e-6)
GATED = attention(ZERO_CENTRED, 32, rotary_dim=8, has_gate=True)
MIXTURE = MoE(5, 2, 32, shared_size=48)
SPECS = {
    "conv": spec_of([CONV, attention(PLAIN), CONV], PLAIN),
    "conv, biases": spec_of(
        [attention(PLAIN, window=9, scale=0.3), ConvSpec(HIDDEN, 4, bias=True)], PLAIN
    ),
    "delta rule": spec_of([DELTA, DELTA, GATED, DELTA], ZERO_CENTRED),
    "delta rule, other gates": spec_of(
        [replace(DELTA, gate="sigmoid"), attention(PLAIN, has_gate=True, qkv_bias=True)], PLAIN
    ),
    "norms of queries by other numbers": spec_of(
        [attention(NormSpec("rms", 1e-2, unit_offset=True)), CONV], PLAIN
    ),
    "rotary in pairs, no norms of queries": spec_of(
        [CONV, attention(PLAIN, qk_norm=None, rotary_interleaved=True, has_gate=True)], PLAIN
    ),
}
each_spec = pytest.mark.parametrize("name", SPECS)


@dataclass
class StateSequence:
    """Tokens, their blocks, and where the states after some of them are."""

    token_ids: list[int]
    block_ids: list[int]
    computed: int = 0
    state: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.computed


@dataclass
class Work:
    """The next tokens of a sequence in a step, where its state goes, and positions to save."""

    sequence: StateSequence
    num_tokens: int
    is_moved: bool = False  # to another block than it is read from
    saves: Sequence[int] = ()


class HybridModel:
    """A model with random weights, and its caches; blocks are taken and not given back."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        deterministic: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        model = build_model(spec, max_model_len=LENGTH, dtype=dtype, device=CPU)
        fill_with_random_weights(model, 0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("log_decay"):  # remembers from two to some hundred tokens
                parameter.uniform_(-5.0, 0.0, generator=generator)
            elif parameter.dim() == 1:
                mean = float("norm" in name and not spec.norm.unit_offset)
                parameter.normal_(mean, 0.3, generator=generator)
        if deterministic:
            check_deterministic(model, CPU)
        WeightProcessor(model, quantization, deterministic=deterministic).finish()
        self.model = model
        self._dtype = dtype
        self._backend = attention_backend(
            CPU, dtype=dtype, block_size=BLOCK_SIZE, deterministic=deterministic
        )
        self.clear()

    def clear(self) -> None:
        spec = self.model.spec
        num_blocks = 8 * LENGTH // BLOCK_SIZE
        kv_cache = allocate_kv_cache(
            num_blocks,
            BLOCK_SIZE,
            groups=KVGroups.single(len(spec.attentions)),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._dtype,
            device=CPU,
        )
        states = allocate_state_caches(NUM_STATES, spec.state_shapes, dtype=self._dtype, device=CPU)
        for cache in states:
            for part in cache:
                if part is not None:
                    part[1:] = math.nan  # what has not been written is not read
        self._caches = caches_by_layer(spec.layers, kv_cache, states)
        self._free = list(range(1, num_blocks))
        self._free_states = list(range(1, NUM_STATES))

    def start(self, token_ids: list[int]) -> StateSequence:
        blocks = [self._free.pop() for _ in range(-(-len(token_ids) // BLOCK_SIZE))]
        return StateSequence(token_ids, blocks)

    def resume(self, sequence: StateSequence, position: int) -> StateSequence:
        """Return a sequence that continues `sequence` from where its state was saved."""
        shared = sequence.block_ids[: position // BLOCK_SIZE]
        own = self.start(sequence.token_ids)
        own.block_ids[: len(shared)] = shared
        own.computed, own.state = position, sequence.saved[position]
        return own

    @torch.inference_mode()
    def step(self, work: Sequence[Work], *, idle_row: bool = False) -> None:
        """Compute a step; with `idle_row` there is a row of two tokens that is not to be computed.

        Rows of one token must come first.
        """
        rows, reads, writes, saves = [], [], [], []
        for each in work:
            sequence, start = each.sequence, each.sequence.computed
            tokens = sequence.token_ids[start : start + each.num_tokens]
            rows.append(BatchRow(tokens, start, sequence.block_ids))
            reads.append(sequence.state)
            writes.append(self._written(each))
            blocks = [self._free_states.pop() for _ in each.saves]
            sequence.saved |= dict(zip(each.saves, blocks, strict=True))
            saves.append([*zip(each.saves, blocks, strict=True), (0, -1), (0, -1)][:2])
        if idle_row:
            rows.append(BatchRow([3, 4], 0, [0]))
            reads, writes, saves = [*reads, 0], [*writes, -1], [*saves, [(0, -1)] * 2]
        batch = build_batch(rows, block_size=BLOCK_SIZE)
        if idle_row:
            batch.seq_lens[-1] = 0
            batch.slot_mapping[-2:] = -1
        arrays = [torch.tensor(array, dtype=torch.int32) for array in (reads, writes, saves)]
        states = StepStates(batch.query_start_loc, batch.seq_lens, *arrays)
        batch = replace(batch, states=states)
        hidden = self.model(batch, self._caches, self._backend.plan(batch))
        logits = self.model.compute_logits(hidden)
        begin = 0
        for each, block in zip(work, writes, strict=False):
            each.sequence.logits.append(logits[begin : begin + each.num_tokens])
            begin += each.num_tokens
            each.sequence.computed += each.num_tokens
            each.sequence.state = block

    def _written(self, work: Work) -> int:
        is_shared = work.sequence.state in (0, *work.sequence.saved.values())
        return self._free_states.pop() if is_shared or work.is_moved else work.sequence.state

    def logits(self, chunks: Sequence[int]) -> Tensor:
        """Return the logits of `TOKENS`, in steps of these tokens, with another sequence beside."""
        sequence, other = self.start(TOKENS), self.start(TOKENS[::-1])
        for i, count in enumerate(chunks):
            position = sequence.computed + (count + 1) // 2
            work = [Work(sequence, count, i % 2 == 1, [position] if i < 3 else [])]
            if count > 1:
                work.insert(0, Work(other, 1))
            self.step(work, idle_row=i % 2 == 0)
        return torch.cat(sequence.logits)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_spec
def test_fused_layers_compute_what_they_do_one_by_one(
    name: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [40, 1, 3, 46, 1, 1]
    fused = HybridModel(SPECS[name], dtype, quantization=quantization)
    assert isinstance(fused.model.model.fused, FusedLayers)
    monkeypatch.setattr(process_weights, "can_fuse", lambda layers: False)
    alone = HybridModel(SPECS[name], dtype, quantization=quantization)
    assert alone.model.model.fused is None
    found = fused.logits(chunks)
    assert found.isfinite().all()
    assert torch.equal(found, alone.logits(chunks))


@each_spec
def test_fused_layers_in_float32_compute_what_they_do_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [40, 1, 3, 46, 1, 1]
    fused = HybridModel(SPECS[name], torch.float32, deterministic=True)
    assert isinstance(fused.model.model.fused, FusedLayers)
    monkeypatch.setattr(process_weights, "can_fuse", lambda layers: False)
    found = fused.logits(chunks)
    wanted = HybridModel(SPECS[name], torch.float32, deterministic=True).logits(chunks)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    monkeypatch.setattr(cpu_gemm, "serves", lambda weight, device: False)
    plain = HybridModel(SPECS[name], torch.float32).logits(chunks)
    assert (found - plain).norm() < 1e-5 * plain.norm()


DETERMINISTIC = {
    **{name: SPECS[name] for name in ("conv", "delta rule", "delta rule, other gates")},
    "mixture of experts": spec_of([DELTA, GATED, DELTA], ZERO_CENTRED, MIXTURE),
}
FORMS: list[tuple[torch.dtype, Quantization | None]] = [
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.float32, None),
]
COUNTS = st.one_of(st.sampled_from([1, 1, 2, 12, 13, 64, 65]), st.integers(1, LENGTH))


@pytest.fixture(scope="module", params=DETERMINISTIC)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return DETERMINISTIC[request.param]


@pytest.fixture(scope="module", params=FORMS, ids=str)
def model(request: pytest.FixtureRequest, spec: ModelSpec) -> HybridModel:
    dtype, quantization = request.param
    return HybridModel(spec, dtype, deterministic=True, quantization=quantization)


@pytest.fixture(scope="module")
def alone(model: HybridModel) -> Tensor:
    """The logits of every position, computed one after the other without company."""
    sequence = model.start(TOKENS)
    for _ in TOKENS:
        model.step([Work(sequence, 1)])
    return torch.cat(sequence.logits)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_logits_depend_on_the_sequence_alone(
    model: HybridModel, alone: Tensor, data: st.DataObject
) -> None:
    """Whatever its chunks are, what runs beside it, on how many threads, and where states are."""
    draw = data.draw
    model.clear()
    own = model.start(TOKENS)
    position = draw(st.integers(1, LENGTH // BLOCK_SIZE - 1), "saved") * BLOCK_SIZE
    others = [model.start([7 * n % 160] * n) for n in draw(st.lists(COUNTS, max_size=3), "others")]
    threads = torch.get_num_threads()
    torch.set_num_threads(draw(st.sampled_from([1, 3]), "threads"))
    try:
        _finish(model, [own, *others], draw, [position])
        found = model.resume(own, position)
        _finish(model, [found, *(each for each in others if each.remaining)], draw, [])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(own.logits), alone)
    assert torch.equal(torch.cat(found.logits), alone[position:])


def _finish(
    model: HybridModel, sequences: Sequence[StateSequence], draw: Any, saves: Sequence[int]
) -> None:
    """Compute all tokens of the first of `sequences`, beside some of the others."""
    own, *others = sequences
    num_steps = 0
    while own.remaining:
        num_steps += 1
        beside = [each for each in others if each.remaining and draw(st.booleans(), "runs")]
        work = []
        for each in (own, *beside):
            # Not too many steps.
            most = each.remaining
            count = min(draw(COUNTS, "chunk") if num_steps < 12 else most, most)
            wanted = [p for p in saves if each is own and 0 < p - each.computed <= count]
            moves = num_steps < 6 and draw(st.booleans(), "moves")
            work.append(Work(each, count, moves, wanted))
        model.step(sorted(work, key=lambda each: each.num_tokens > 1))


def test_fused_layers_time_the_parts_that_they_have() -> None:
    parts = {"norms", "gate_up_proj", "down_proj", "in_proj", "out_proj"}
    attention_parts = {"qkv_proj", "rotary", "attention", "o_proj"}
    for name, others in (("conv", {"conv"}), ("delta rule", {"state", "gate"})):
        model = HybridModel(SPECS[name], torch.bfloat16)
        model.logits([5, 1])
        fused = model.model.model.fused
        assert isinstance(fused, FusedLayers)
        seconds = fused.take_seconds()
        assert seconds.keys() == parts | attention_parts | others
        assert all(taken > 0 for taken in seconds.values())
        assert not any(fused.take_seconds().values())


def test_process_weights_lays_out_state_layers_once() -> None:
    model = HybridModel(SPECS["delta rule"], torch.bfloat16).model
    mixer = model.model.layers[0].state_mixer
    assert isinstance(mixer, DeltaNet)
    weight, decay = mixer.conv_weight, mixer.decay
    assert weight.t().is_contiguous()
    assert torch.equal(decay, -mixer.log_decay.exp())
    address = weight.data_ptr()
    WeightProcessor(model, None).process(model.model)
    assert mixer.conv_weight.data_ptr() == address
    assert mixer.decay is decay
