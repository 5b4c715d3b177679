"""ModelSpec: what a model is, as plain frozen data. Importing this imports no torch.

A family's file in `engine.models.families` makes it of a checkpoint's `config.json`;
`engine.models.build` makes a model of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.layers.rope import QueryScaling, Rope
from engine.models.tensor_names import TensorNames

if TYPE_CHECKING:
    import torch

# Where a layer has its norms, around the attention and the MLP that are added to the residual
# stream. pre: before each (Llama). post: after each, before the addition (OLMo 2). sandwich: both
# (Gemma 2). parallel: one norm before both, which are added together (Phi-2, Falcon).
# parallel_apart: the same, with a norm before each (GPT-NeoX).
NormPlaces = Literal["pre", "post", "sandwich", "parallel", "parallel_apart"]

# Of the router's logits: over all experts, or of each.
Scores = Literal["softmax", "sigmoid"]

GatedActivation = Literal["silu", "gelu", "gelu_tanh"]
PlainActivation = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What a rank has of `full` heads, features or tokens: `size` of them from `start` on."""

    start: int
    size: int
    full: int

    @property
    def indices(self) -> range:
        return range(self.start, self.start + self.size)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation.

    Attributes:
        kind: `rms`, or `layer` for a layer norm.
        unit_offset: scale by 1 + weight (Gemma, Nemotron).
        has_weight, has_bias: of a layer norm; without, it scales by 1, and adds nothing.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    has_weight: bool = True
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal self-attention with grouped queries.

    Attributes:
        scale: of the scores.
        soft_cap: with c, scores s become c tanh(s / c); None: there is none.
        has_sinks: each head has a learned score without a value in the softmax.
        rope: rotary embedding and its scaling; None: the layer has none.
        rotary_dim: leading dimensions of a head that are rotated.
        rotary_interleaved: dimension 2i is rotated with 2i + 1, not i with i + rotary_dim / 2.
        query_scaling: of the rotated queries; None: there is none.
        window: positions that a token sees, its own included; None: all.
        qkv_bias, output_bias: which projections have a bias.
        qk_norm: of the queries and keys, before they are rotated; None: there is none.
        qk_norm_is_wide: it is over all heads together, not over each.
        has_gate: the output of each head is multiplied by the sigmoid of a gate, which its query
            projection gives behind its query.
        query_heads, kv_heads: of a rank, which of the model's heads it has; None: all.
        shares_keys: an earlier rank has the same KV head, with other queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    rotary_dim: int
    rotary_interleaved: bool = False
    query_scaling: QueryScaling | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_is_wide: bool = False
    has_gate: bool = False
    query_heads: ShardRange | None = None
    kv_heads: ShardRange | None = None
    shares_keys: bool = False

    @property
    def all_heads(self) -> tuple[int, int]:
        """Query heads and KV heads of all ranks."""
        if self.query_heads is None or self.kv_heads is None:
            return self.num_heads, self.num_kv_heads
        return self.query_heads.full, self.kv_heads.full


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer keeps of a sequence in place of the keys and values of its tokens.

    Attributes:
        channels: of the convolution, whose inputs for the last `kernel` tokens are kept.
        heads: each with a matrix of `key_dim` x `value_dim` in float32; 0: there is none.
    """

    channels: int
    kernel: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence in one layer of a model that computes in `dtype`."""
        inputs = self.channels * self.kernel * dtype.itemsize
        return inputs + 4 * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A short causal convolution between two gates: C * conv(B * x), of one product B, C, x (LFM2).

    Attributes:
        channels: as many as the model has features.
        kernel: tokens that the convolution sees.
        bias: of its projections and the convolution.
    """

    channels: int
    kernel: int
    bias: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape(self.channels, self.kernel)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule, after a short convolution (Qwen 3.5).

    Attributes:
        num_key_heads: heads of queries and keys, each of which serves several heads of values.
        num_heads: heads of values.
        kernel: tokens that the convolution sees.
        norm_eps: of the norm over each head of the output, before the output's gate.
        gate: activation of that gate.
        by_key_head: the checkpoint has the projections of each key head side by side, with those of
            the values that it serves (Qwen3-Next).
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float
    gate: Literal["silu", "sigmoid"] = "silu"
    by_key_head: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        return StateShape(self.channels, self.kernel, self.num_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class SSDSpec:
    """State space duality, after a short convolution (Mamba 2).

    Attributes:
        head_dim: of the values of each head.
        state_size: dimensions that the state of a head has for each of them.
        num_groups: of heads that share what they put into their states and read of them.
        kernel: tokens that the convolution sees.
        conv_bias, bias: of the convolution, and of the projections.
        dt_limits: least and largest time step.
        norm_eps: of the norm over the heads of each group, behind the output's gate.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    conv_bias: bool
    bias: bool
    dt_limits: tuple[float, float]
    norm_eps: float

    @property
    def channels(self) -> int:
        """Channels of the convolution: values of all heads, and two state vectors of each group."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> StateShape:
        return StateShape(
            self.channels, self.kernel, self.num_heads, self.state_size, self.head_dim
        )


# What mixes the tokens of a sequence in a layer.
Mixer = AttentionSpec | ConvSpec | DeltaSpec | SSDSpec


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x)) * up(x)), with `size` features between.

    Attributes:
        features: of a rank, which of the model's features it has; None: all.
    """

    size: int
    activation: GatedActivation = "silu"
    bias: bool = False
    features: ShardRange | None = None


@dataclass(frozen=True, slots=True)
class Plain:
    """down(activation(up(x))), with `size` features between.

    Attributes:
        features: of a rank, which of the model's features it has; None: all.
    """

    size: int
    activation: PlainActivation
    bias: bool = True
    features: ShardRange | None = None


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of gated MLPs of `size`, of which each token goes through `top_k`.

    An expert is down((up(x) + up_offset) * activation(gate(x))), of clamped gates and ups.

    Attributes:
        alpha: SiLU is gate * sigmoid(alpha * gate).
        limit: gates are at most this, ups at most this in magnitude; None: they are not clamped.
        bias: of the experts' projections and of the router.
        scores: how the router's logits become the weights.
        chooses_by_bias: experts have a bias, with which the scores choose, but do not weigh.
        normalizes: the weights of the chosen experts are divided by their sum.
        weight_scale: multiplies the weights.
        shared_size: of an expert that every token goes through; 0: none.
        shared_is_gated: behind a gate of its own.
        features, shared_features: of a rank, which of the features of each expert, and of the
            shared one, it has; None: all.
        experts: of a rank, which experts it has; None: all.
    """

    num_experts: int
    top_k: int
    size: int
    activation: GatedActivation = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    bias: bool = False
    scores: Scores = "softmax"
    chooses_by_bias: bool = False
    normalizes: bool = True
    weight_scale: float = 1.0
    shared_size: int = 0
    shared_is_gated: bool = True
    features: ShardRange | None = None
    shared_features: ShardRange | None = None
    experts: ShardRange | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        residual_multiplier: of what mixer and MLP add to the residual stream.
    """

    mixer: Mixer
    mlp: Gated | Plain | MoE
    norm: NormSpec
    norms: NormPlaces = "pre"
    residual_multiplier: float = 1.0

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that is known to have attention."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A vector per position, added to the embeddings.

    Attributes:
        size: rows of the table, all of which the checkpoint has.
        offset: row of position 0.
    """

    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder with a head over the vocabulary.

    Attributes:
        architecture: key of `engine.models.registry.FAMILIES`.
        norm: after the last layer.
        context_length: in tokens, rope scaling included.
        dtype: type the checkpoint was saved in: float32, bfloat16 or float16.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: ids that end a sequence, possibly none.
        tensor_names: how the checkpoint names its tensors.
        learned_positions: None where the model has none.
        embedding_multiplier: of the embeddings; rounded to the model's dtype.
        head_bias: the head has a bias.
        logit_multiplier: of the logits.
        logit_soft_cap: with c, logits l become c tanh(l / c); None: there is none.
        rank, num_ranks: which of the model's ranks this is, as `engine.models.sharding` cuts it.
        vocabulary: of a rank, the tokens whose embeddings and logits it has; None: all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    context_length: int
    dtype: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    tensor_names: TensorNames
    learned_positions: LearnedPositions | None = None
    embedding_multiplier: float = 1.0
    head_bias: bool = False
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    rank: int = 0
    num_ranks: int = 1
    vocabulary: ShardRange | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary whose embeddings and logits it has."""
        return self.vocab_size if self.vocabulary is None else self.vocabulary.size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Those of the layers that have attention, in their order; at least one."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the other layers keep of a sequence, in their order: all of one shape."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.state for mixer in mixers if not isinstance(mixer, AttentionSpec))

    @property
    def num_heads(self) -> int:
        """Query heads, which are as many in every layer with attention."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads, which are as many in every layer with attention."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a head, which are as many in every layer with attention."""
        return self.attentions[0].head_dim

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Per layer with attention, positions that a token sees, its own included; None: all."""
        return tuple(attention.window for attention in self.attentions)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token, all layers, in a cache of `dtype`."""
        return 2 * len(self.attentions) * self.num_kv_heads * self.head_dim * dtype.itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the states of one sequence, all layers, of a model that computes in `dtype`."""
        return sum(shape.num_bytes(dtype) for shape in self.state_shapes)
