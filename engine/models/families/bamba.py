"""Bamba: Mamba 2 in most layers, attention with partial rotary embeddings in the others."""

from __future__ import annotations

import math

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import Gated, LayerSpec, ModelSpec, SSDSpec
from engine.models.tensor_names import TensorNames

# Far more than those of all models, and states of them can be counted in bytes.
_MOST_HEADS = 4096
_MOST_DIM = 4096

_INFINITY = {"__float__": "Infinity"}  # as transformers writes it

MAMBA_NAMES = (
    ("state_mixer.conv_weight", "mamba.conv1d.weight"),
    ("state_mixer.conv_bias", "mamba.conv1d.bias"),
    ("state_mixer.log_decay", "mamba.A_log"),
    ("state_mixer.skip", "mamba.D"),
    ("state_mixer.norm_weight", "mamba.norm.weight"),
    ("state_mixer", "mamba"),
)
_NAMES = TensorNames(
    renamed=(
        *MAMBA_NAMES,
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
        ("mlp", "feed_forward"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    norm, bias = parsing.rms_norm(fields), fields.boolean("attention_bias", default=False)
    heads = parsing.heads(fields, num_kv_heads=8)
    attention = parsing.attention(
        heads,
        parse_rope(fields, is_partial=True),
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.5),
        qkv_bias=bias,
        output_bias=bias,
    )
    mixer = mamba2(fields)
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    count = parsing.num_layers(fields)
    attentions = fields.integers("attn_layer_indices")
    if not all(0 <= i < count for i in attentions):
        raise fields.error("attn_layer_indices", f"must be layers below num_hidden_layers {count}")
    layers = [LayerSpec(attention if i in attentions else mixer, mlp, norm) for i in range(count)]
    return parsing.model_spec(fields, architecture, layers, norm, tensor_names=_NAMES)


def mamba2(fields: Fields) -> SSDSpec:
    """Make the spec of the layers without attention of IBM's models, of fields `mamba_*`."""
    if parsing.gated_activation(fields) != "silu":  # of the convolution too
        raise fields.unsupported("hidden_act", "is supported only if it is silu")
    size = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    num_heads = fields.integer("mamba_n_heads", default=128, maximum=_MOST_HEADS)
    num_groups = fields.integer("mamba_n_groups", default=1)
    if size % num_heads:
        raise fields.error("mamba_n_heads", f"must divide mamba_expand * hidden_size ({size})")
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", f"must divide mamba_n_heads ({num_heads})")
    head_dim = size // num_heads
    if fields.raw("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head", maximum=_MOST_DIM)
    if head_dim * num_heads != size:
        problem = f"times mamba_n_heads must be mamba_expand * hidden_size ({size})"
        raise fields.error("mamba_d_head", problem)
    return SSDSpec(
        num_heads,
        head_dim,
        fields.integer("mamba_d_state", default=256, maximum=_MOST_DIM),
        num_groups,
        fields.integer("mamba_d_conv", default=4, maximum=parsing.MOST_TAPS),
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        bias=fields.boolean("mamba_proj_bias", default=False),
        dt_limits=_dt_limits(fields),
        norm_eps=fields.number("rms_norm_eps"),
    )


def _dt_limits(fields: Fields) -> tuple[float, float]:
    """Read `time_step_limit`, the least and the largest time step."""
    given = fields.raw("time_step_limit")
    if given is None:
        return 0.0, math.inf
    limits = given if isinstance(given, list) else []
    limits = [math.inf if each == _INFINITY else each for each in limits]
    if not all(isinstance(each, int | float) for each in limits):
        limits = []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise fields.error("time_step_limit", f"must be two ascending numbers (got {given!r})")
    return float(limits[0]), float(limits[1])
