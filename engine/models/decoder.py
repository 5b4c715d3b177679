"""Decoder: the layers of a model, built from its spec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers import moe
from engine.layers.attention import Attention, LayerCache, QKNorm, StepAttention
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.fp8 import Fp8Norm
from engine.layers.mlp import GatedMLP, PlainMLP
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.rank_group import RankGroup
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.layers.scheme import Scheme
from engine.layers.state_mixer import DeltaNet, Mamba2, ShortConv, StateMixer
from engine.layers.vocabulary import Embedding, PositionEmbedding
from engine.models.batch import Batch
from engine.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    Gated,
    LayerSpec,
    ModelSpec,
    MoE,
    NormPlaces,
    NormSpec,
    Plain,
    SSDSpec,
)
from kernels.cpu.decoder_layers import decoder_layers
from kernels.experts.activation import ExpertActivation
from kernels.state.states import StateCache


def _norm(spec: NormSpec, size: int, scheme: Scheme) -> RMSNorm | LayerNorm:
    if spec.kind == "layer":
        return LayerNorm(
            size,
            spec.eps,
            unit_offset=spec.unit_offset,
            has_weight=spec.has_weight,
            has_bias=spec.has_bias,
            dtype=scheme.dtype,
            device=scheme.device,
        )
    return RMSNorm(
        size, spec.eps, unit_offset=spec.unit_offset, dtype=scheme.dtype, device=scheme.device
    )


def _attention(
    spec: AttentionSpec, hidden_size: int, scheme: Scheme, group: RankGroup | None
) -> Attention:
    qk_norm = None
    if spec.qk_norm is not None:
        qk_norm = QKNorm(spec.qk_norm.eps, spec.qk_norm.unit_offset, spec.qk_norm_is_wide)
    return Attention(
        hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        rotary_interleaved=spec.rotary_interleaved,
        sliding_window=spec.window,
        soft_cap=spec.soft_cap,
        has_sinks=spec.has_sinks,
        qk_norm=qk_norm,
        has_gate=spec.has_gate,
        scheme=scheme,
        group=group,
        all_heads=spec.all_heads,
        first_kv_head=0 if spec.kv_heads is None else spec.kv_heads.start,
        shares_keys=spec.shares_keys,
    )


def _state_mixer(
    spec: ConvSpec | DeltaSpec | SSDSpec, hidden_size: int, scheme: Scheme
) -> StateMixer:
    if isinstance(spec, ConvSpec):
        return ShortConv(hidden_size, spec.channels, spec.kernel, bias=spec.bias, scheme=scheme)
    if isinstance(spec, SSDSpec):
        return Mamba2(
            hidden_size,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            state_size=spec.state_size,
            num_groups=spec.num_groups,
            kernel=spec.kernel,
            conv_bias=spec.conv_bias,
            bias=spec.bias,
            dt_limits=spec.dt_limits,
            norm_eps=spec.norm_eps,
            scheme=scheme,
        )
    return DeltaNet(
        hidden_size,
        num_key_heads=spec.num_key_heads,
        num_heads=spec.num_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        kernel=spec.kernel,
        norm_eps=spec.norm_eps,
        gate=spec.gate,
        by_key_head=spec.by_key_head,
        scheme=scheme,
    )


def _mlp(spec: Gated | Plain | MoE, hidden_size: int, scheme: Scheme) -> nn.Module:
    match spec:
        case Gated(size, activation, bias):
            return GatedMLP(hidden_size, size, activation=activation, bias=bias, scheme=scheme)
        case Plain(size, plain_activation, bias):
            return PlainMLP(
                hidden_size, size, activation=plain_activation, bias=bias, scheme=scheme
            )
        case MoE(limit=limit):
            return moe.MoE(
                hidden_size,
                spec.size,
                num_experts=spec.num_experts,
                own=None if spec.experts is None else spec.experts.indices,
                top_k=spec.top_k,
                scores=spec.scores,
                chooses_by_bias=spec.chooses_by_bias,
                normalizes=spec.normalizes,
                weight_scale=spec.weight_scale,
                activation=ExpertActivation(
                    spec.activation,
                    spec.alpha,
                    math.inf if limit is None else limit,
                    spec.up_offset,
                ),
                shared_size=spec.shared_size,
                shared_is_gated=spec.shared_is_gated,
                bias=spec.bias,
                scheme=scheme,
            )


class DecoderLayer(nn.Module):
    """A mixer and an MLP, added to the residual stream, with the norms of the spec.

    Attributes:
        self_attn: the mixer, if it is attention.
        state_mixer: the mixer, if it keeps states.
        attention_norm, mlp_norm: before the mixer and the MLP; None where there is none.
            Conversion may let them quantise.
        attention_output_norm, mlp_output_norm: after them; likewise.

    Args:
        group: other ranks, which compute the other parts of the layer; None: there are none.
        passes_part: what comes from the layer before, and what this one returns, is this rank's
            part, which the norm that follows sums.
    """

    def __init__(
        self,
        spec: LayerSpec,
        hidden_size: int,
        scheme: Scheme,
        group: RankGroup | None = None,
        *,
        passes_part: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        self._parts = group if passes_part else None

        def norm(*places: NormPlaces) -> RMSNorm | LayerNorm | Fp8Norm | None:
            return _norm(spec.norm, hidden_size, scheme) if spec.norms in places else None

        self.attention_norm = norm("pre", "sandwich", "parallel", "parallel_apart")
        self.self_attn: Attention | None = None
        self.state_mixer: StateMixer | None = None
        if isinstance(spec.mixer, AttentionSpec):
            self.self_attn = _attention(spec.mixer, hidden_size, scheme.at("self_attn"), group)
        else:
            self.state_mixer = _state_mixer(spec.mixer, hidden_size, scheme.at("state_mixer"))
        self.attention_output_norm = norm("post", "sandwich")
        self.mlp_norm = norm("pre", "sandwich", "parallel_apart")
        self.mlp = _mlp(spec.mlp, hidden_size, scheme.at("mlp"))
        self.mlp_output_norm = norm("post", "sandwich")

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotation | None,
        batch: Batch,
        cache: LayerCache | StateCache,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's output, not yet added, and the residual stream to add it to.

        Args:
            rotary: of a layer with attention.
        """
        x, residual = _add_and_norm(self.attention_norm, x, residual, self._parts)
        slot_mapping = batch.group_slot_mapping(0)  # padding has no slot in any group
        mixed: Tensor
        if self.self_attn is not None:
            assert isinstance(cache, LayerCache)
            slot_mapping = batch.group_slot_mapping(cache.group)
            mixed = self.self_attn(x, rotary, slot_mapping, cache, attention)
        else:
            assert self.state_mixer is not None
            mixed = self.state_mixer(x, cache, batch.states)
        if self._parts is not None:
            x, residual = _add_and_norm(self.mlp_norm, mixed, residual, self._parts)
            return self._through_mlp(x, slot_mapping), residual
        if self.spec.norms in ("parallel", "parallel_apart"):
            x = x if self.mlp_norm is None else self.mlp_norm(residual)
            both = self._sum(mixed + self._through_mlp(x, slot_mapping))
            return self._scale(both), residual
        mixed = self._sum(mixed)
        if self.attention_output_norm is not None:
            mixed = self.attention_output_norm(mixed)
        x, residual = _add_and_norm(self.mlp_norm, self._scale(mixed), residual)
        x = self._sum(self._through_mlp(x, slot_mapping))
        if self.mlp_output_norm is not None:
            x = self.mlp_output_norm(x)
        return self._scale(x), residual

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of the parts that the ranks have computed."""
        return x if self.group is None else self.group.sum(x)

    def _scale(self, x: Tensor) -> Tensor:
        multiplier = self.spec.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _through_mlp(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        out: Tensor = self.mlp(x, slot_mapping) if isinstance(self.mlp, moe.MoE) else self.mlp(x)
        return out


def _add_and_norm(
    norm: RMSNorm | LayerNorm | Fp8Norm | None,
    x: Tensor,
    residual: Tensor | None,
    parts: RankGroup | None = None,
) -> tuple[Any, Tensor]:
    """Return the norm of `x + residual`, and the sum; without a norm the sum twice.

    Args:
        parts: the ranks, each of which has a part of `x`; without a residual it is whole.
    """
    if parts is not None and residual is not None:
        if isinstance(norm, RMSNorm):
            pair: tuple[Tensor, Tensor] = parts.sum_norm(
                x, residual, norm.weight, norm.eps, unit_offset=norm.unit_offset
            )
            return pair
        x = parts.sum(x)
    if norm is not None and residual is not None:
        return norm.add(x, residual)
    total = x if residual is None else x + residual
    return (total if norm is None else norm(total)), total


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Attributes:
        fused: runs all layers in one operation, from their tensors and the batch alone; None: the
            layers run one by one.

    Args:
        group: other ranks, as `spec` is one; None: there are none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        scheme: Scheme,
        *,
        max_model_len: int,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        size, dtype, device = spec.hidden_size, scheme.dtype, scheme.device
        self.embed_tokens = Embedding(
            spec.num_tokens,
            size,
            dtype=dtype,
            device=device,
            group=group,
            first_token=0 if spec.vocabulary is None else spec.vocabulary.start,
        )
        self._multiplier: Tensor | None = None
        if spec.embedding_multiplier != 1.0:
            self._multiplier = torch.tensor(spec.embedding_multiplier, dtype=dtype, device=device)
        self.embed_positions: PositionEmbedding | None = None
        if (learned := spec.learned_positions) is not None:
            self.embed_positions = PositionEmbedding(
                learned.size, learned.offset, size, dtype=dtype, device=device
            )
        ropes = [(each.rope, each.rotary_dim, each.query_scaling) for each in spec.attentions]
        kinds = list(dict.fromkeys(ropes))
        self.rotary = nn.ModuleList(
            RotaryEmbedding(rope, dim, max_model_len, query_scaling=scaling, device=device)
            for rope, dim, scaling in kinds
        )
        self._tables = [kinds.index(rope) for rope in ropes]  # of each layer with attention
        passes_part = (
            group is not None
            and group.sum_norm is not None
            and all(each.norms == "pre" and each.residual_multiplier == 1.0 for each in spec.layers)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(layer, size, scheme.at(f"layers.{i}"), group, passes_part=passes_part)
            for i, layer in enumerate(spec.layers)
        )
        self._parts = group if passes_part else None  # of the last layer
        self.fused: nn.Module | None = None
        self.norm = _norm(spec.norm, size, scheme)

    def forward(
        self,
        batch: Batch,
        kv_cache: Sequence[LayerCache | StateCache],
        attention: StepAttention,
    ) -> Tensor:
        x: Tensor = self.embed_tokens(batch.token_ids)
        if self._multiplier is not None:
            x = x * self._multiplier
        if self.embed_positions is not None:
            x = x + self.embed_positions(batch.positions)
        residual: Tensor | None = None
        rotary = [table(batch.positions) for table in self.rotary]
        if self.fused is not None:
            x, residual = self.fused(x, rotary[0], batch, kv_cache)
        else:
            tables = (rotary[table] for table in self._tables)
            for layer, cache in zip(self.layers, kv_cache, strict=True):
                rotation = next(tables) if isinstance(cache, LayerCache) else None
                x, residual = layer(x, residual, rotation, batch, cache, attention)
        assert residual is not None
        normed: Tensor = _add_and_norm(self.norm, x, residual, self._parts)[0]
        return normed


class FusedLayers(nn.Module):
    """Replaces `DecoderLayer`s, with the same result; `can_fuse` must allow them.

    For a single sequence, the time that Python takes between operations is a large part of a step.

    Args:
        invariant: a token's result does not depend on others.
    """

    def __init__(self, layers: Sequence[DecoderLayer], *, invariant: bool = False) -> None:
        super().__init__()
        self._layers = decoder_layers(invariant=invariant)
        if (group := layers[0].group) is not None:
            self._layers.sum_over(group.shared_sum)
        # That the layers are bound to.
        self._kv_cache: Sequence[LayerCache | StateCache] | None = None
        for layer in layers:
            self._layers.append(_tensors(layer), _numbers(layer), _kind(layer.spec))

    def forward(
        self,
        x: Tensor,
        rotary: Rotation,
        batch: Batch,
        kv_cache: Sequence[LayerCache | StateCache],
    ) -> tuple[Tensor, Tensor]:
        """Return the last layer's output, not yet added, and the residual stream to add it to.

        Args:
            x: [T, hidden_size], the embeddings.
            kv_cache: one entry per layer; T slots of each are written, or the states of its rows.
        """
        if kv_cache is not self._kv_cache:  # a list of tensors takes time to pass
            self._layers.bind(*map(list, zip(*map(_bound, kv_cache), strict=True)))
            self._kv_cache = kv_cache
        groups = range(batch.num_groups)
        states = batch.states
        out: tuple[Tensor, Tensor] = self._layers.forward(
            x,
            *rotary,
            [batch.group_slot_mapping(group) for group in groups],
            batch.query_start_loc,
            batch.seq_lens,
            [batch.group_tables(group) for group in groups],
            [] if states is None else [states.reads, states.writes, states.saves],
        )
        return out

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds that each part of the layers took in all steps since the last call."""
        return dict(self._layers.take_seconds())


def can_fuse(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether `layers` can be fused: by their specs, and all their linears are packed."""
    group = layers[0].group
    mixers = (layer.spec.mixer for layer in layers)
    first = next(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))
    return (group is None or group.shared_sum is not None) and all(
        fuses(layer.spec, first)
        and all(isinstance(each, CpuPackedLinear) for each in _projections(layer).values())
        for layer in layers
    )


def fuses(layer: LayerSpec, first: AttentionSpec) -> bool:
    """Return whether the operation computes such a layer, in one call with attention as `first`."""
    return (
        layer.norms == "pre"
        and layer.residual_multiplier == 1.0
        and layer.norm.kind == "rms"
        and isinstance(layer.mlp, Gated)
        and layer.mlp.activation == "silu"
        and not isinstance(layer.mixer, SSDSpec)
        and not (isinstance(layer.mixer, DeltaSpec) and layer.mixer.by_key_head)
        and (not isinstance(layer.mixer, AttentionSpec) or _fuses_attention(layer.mixer, first))
    )


def _fuses_attention(attention: AttentionSpec, first: AttentionSpec) -> bool:
    return (
        (attention.qk_norm is None or attention.qk_norm.kind == "rms")
        and not attention.qk_norm_is_wide
        and attention.rope == first.rope
        and attention.rotary_dim == first.rotary_dim
        and attention.query_scaling == first.query_scaling
        and attention.soft_cap is None
        and not attention.has_sinks
    )


def _kind(layer: LayerSpec) -> str:
    """Return the name of a layer's mixer; as in csrc/decoder_layers.h, as all that follows."""
    kinds = {AttentionSpec: "attention", ConvSpec: "short_conv", DeltaSpec: "delta_rule"}
    return kinds[type(layer.mixer)]


def _tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    norms = {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
    match mixer := layer.self_attn or layer.state_mixer:
        case Attention():
            norms |= {"q_norm": mixer.q_norm, "k_norm": mixer.k_norm}
        case ShortConv():
            if mixer.conv_bias is not None:
                tensors["conv_bias"] = mixer.conv_bias
        case DeltaNet():
            tensors |= {
                "decay": mixer.decay,
                "dt_bias": mixer.dt_bias,
                "norm_weight": mixer.norm_weight,
            }
    if not isinstance(mixer, Attention):
        assert mixer is not None
        tensors["conv_weight"] = mixer.conv_weight.t().contiguous()
    for name, norm in norms.items():
        if norm is not None:
            assert isinstance(norm, RMSNorm)
            tensors[f"{name}.weight"] = norm.weight
    for name, projection in _projections(layer).items():
        assert isinstance(projection, CpuPackedLinear)
        for part, tensor in projection.tensors().items():
            tensors[f"{name}.{part}"] = tensor
    return tensors


def _projections(layer: DecoderLayer) -> dict[str, nn.Module]:
    mixer, mlp = layer.self_attn or layer.state_mixer, layer.mlp
    assert isinstance(mlp, GatedMLP)
    projections = {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj}
    if isinstance(mixer, Attention):
        return {"qkv_proj": mixer.qkv_proj, "o_proj": mixer.o_proj, **projections}
    assert mixer is not None
    if isinstance(mixer, DeltaNet):
        projections["gates"] = mixer.gates
    return {"in_proj": mixer.in_proj, "out_proj": mixer.out_proj, **projections}


def _numbers(layer: DecoderLayer) -> dict[str, float]:
    spec = layer.spec
    numbers: dict[str, float] = {
        "norm_eps": spec.norm.eps,
        "unit_offset": spec.norm.unit_offset,
    }
    match spec.mixer:
        case AttentionSpec() as attention:
            numbers |= {
                "num_heads": attention.num_heads,
                "num_kv_heads": attention.num_kv_heads,
                "head_dim": attention.head_dim,
                "scale": attention.scale,
                "sliding_window": attention.window or 0,
                "rotary_interleaved": attention.rotary_interleaved,
                "has_gate": attention.has_gate,
            }
            if (norm := attention.qk_norm) is not None:
                numbers |= {"qk_norm_eps": norm.eps, "qk_unit_offset": norm.unit_offset}
        case DeltaSpec() as delta:
            numbers |= {
                "num_heads": delta.num_heads,
                "num_key_heads": delta.num_key_heads,
                "gated_norm_eps": delta.norm_eps,
                "gate_is_sigmoid": delta.gate == "sigmoid",
            }
    return {name: float(number) for name, number in numbers.items()}


def _bound(cache: LayerCache | StateCache) -> tuple[Tensor, Tensor | None, int]:
    if isinstance(cache, LayerCache):
        return cache.key, cache.value, cache.group
    return cache.ring, cache.state, 0
