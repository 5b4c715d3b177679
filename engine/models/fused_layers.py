"""FusedLayers: all decoder layers on a CPU in one operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from engine.layers.attention import LayerCache
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.panel_linear import PanelLinear
from engine.layers.rotary import Rotation
from engine.models.batch import Batch
from engine.models.decoder import DecoderLayer
from engine.models.spec import Gated, LayerSpec, NormSpec
from kernels.cpu.decoder_layers import decoder_layers


class FusedLayers(nn.Module):
    """Replaces `DecoderLayer`s, with the same result; `can_fuse` must allow them.

    For a single sequence, the time that Python takes between operations is a large part of a step.

    Args:
        invariant: a token's result does not depend on others.
    """

    def __init__(self, layers: Sequence[DecoderLayer], *, invariant: bool = False) -> None:
        super().__init__()
        attention = layers[0].self_attn
        self._layers = decoder_layers(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            norm_eps=layers[0].spec.norm.eps,
            interleaved=layers[0].spec.attention.rotary_interleaved,
            invariant=invariant,
        )
        self._kv_cache: Sequence[LayerCache] | None = None  # that the layers are bound to
        for layer in layers:
            self._layers.append(_tensors(layer), layer.self_attn.sliding_window)

    def forward(
        self,
        x: Tensor,
        rotary: Rotation,
        batch: Batch,
        kv_cache: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        """Return the last layer's output, not yet added, and the residual stream to add it to.

        Args:
            x: [T, hidden_size], the embeddings.
            kv_cache: one entry per layer; T slots of each are written.
        """
        if kv_cache is not self._kv_cache:  # a list of tensors takes time to pass
            self._layers.bind(*map(list, zip(*kv_cache, strict=True)))
            self._kv_cache = kv_cache
        groups = range(batch.num_groups)
        out: tuple[Tensor, Tensor] = self._layers.forward(
            x,
            *rotary,
            [batch.group_slots(group) for group in groups],
            batch.query_start_loc,
            batch.seq_lens,
            [batch.group_tables(group) for group in groups],
        )
        return out

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds that each part of the layers took in all steps since the last call."""
        return dict(self._layers.take_seconds())


def can_fuse(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether `layers` can be fused: they are Llama's, and their projections panels."""
    return all(
        _is_llama(layer.spec, layers[0].spec)
        and all(isinstance(each, PanelLinear) for each in _projections(layer).values())
        for layer in layers
    )


def _is_llama(layer: LayerSpec, first: LayerSpec) -> bool:
    """Return whether the operation computes such a layer, in one call with the layer `first`."""
    attention = layer.attention
    return (
        layer.norms == "pre"
        and layer.residual_multiplier == 1.0
        and layer.norm == first.norm == NormSpec("rms", layer.norm.eps)
        and attention.qk_norm in (None, layer.norm)
        and attention.rope == first.attention.rope
        and attention.rotary_dim == first.attention.rotary_dim
        and attention.rotary_interleaved == first.attention.rotary_interleaved
        and attention.query_scaling == first.attention.query_scaling
        and attention.scale == attention.head_dim**-0.5
        and attention.soft_cap is None
        and not attention.has_sinks
        and not attention.qk_norm_is_wide
        and isinstance(layer.mlp, Gated)
        and layer.mlp.activation == "silu"
    )


def _tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    attention = layer.self_attn
    assert isinstance(layer.attention_norm, RMSNorm)
    assert isinstance(layer.mlp_norm, RMSNorm)
    tensors: dict[str, Tensor] = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
    }
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if norm is not None:
            tensors[f"{name}.weight"] = norm.weight
    for name, projection in _projections(layer).items():
        assert isinstance(projection, PanelLinear)
        for part, tensor in projection.tensors().items():
            tensors[f"{name}.{part}"] = tensor
    return tensors


def _projections(layer: DecoderLayer) -> dict[str, nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, GatedMLP)
    return {
        "qkv_proj": attention.qkv_proj,
        "o_proj": attention.o_proj,
        "gate_up_proj": mlp.gate_up_proj,
        "down_proj": mlp.down_proj,
    }
