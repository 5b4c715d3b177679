"""FusedLayer: a whole decoder layer on a CPU in one operation."""

from __future__ import annotations

from torch import Tensor, nn

from engine.execution.attention import LayerCache, StepAttention
from engine.execution.cpu_attention import CpuStepAttention
from engine.layers.panel_linear import PanelLinear
from engine.models.causal_lm import DecoderLayer
from kernels.cpu.decoder_layer import decoder_layer


class FusedLayer(nn.Module):
    """The same as the `DecoderLayer` it is made of, which must be one that `can_fuse`.

    At a single sequence, what Python takes between the operations of a layer is a good part of what
    they take themselves.

    Attributes:
        int8: whether its products are ones of 8-bit integers.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        attention = layer.self_attn
        tensors: dict[str, Tensor] = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        }
        for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
            if norm is not None:
                tensors[f"{name}.weight"] = norm.weight
        self.int8 = False
        for name, projection in _projections(layer).items():
            assert isinstance(projection, PanelLinear)
            self.int8 |= projection.int8
            for part, tensor in projection.tensors().items():
                tensors[f"{name}.{part}"] = tensor
        self._layer = decoder_layer(
            tensors,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            norm_eps=layer.input_layernorm.eps,
            sliding_window=attention.sliding_window,
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Do what `DecoderLayer.forward` does, with the attention of the CPU's own kernel."""
        assert isinstance(attention, CpuStepAttention)
        batch = attention.batch
        out: tuple[Tensor, Tensor] = self._layer.forward(
            x,
            residual,
            *rotary,
            slot_mapping,
            cache.key,
            cache.value,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
        )
        return out

    def take_seconds(self) -> dict[str, float]:
        """Return what each part of the layer has taken since this was last asked, in all steps."""
        return dict(self._layer.take_seconds())


def can_fuse(layer: DecoderLayer) -> bool:
    """Return whether there is a `FusedLayer` of `layer`: all its projections lie in panels."""
    return all(isinstance(each, PanelLinear) for each in _projections(layer).values())


def _projections(layer: DecoderLayer) -> dict[str, nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv_proj": attention.qkv_proj,
        "o_proj": attention.o_proj,
        "gate_up_proj": mlp.gate_up_proj,
        "down_proj": mlp.down_proj,
    }
