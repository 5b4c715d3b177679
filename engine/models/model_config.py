"""ModelConfig: a checkpoint's `config.json`, read and checked once.

Every quirk of the Hugging Face format is handled here and in `engine.models.rope`; the models read
plain fields. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import UnsupportedError
from engine.layers.rope import DynamicRope, LinearRope, Rope, YarnRope
from engine.models.fields import Fields, read_json_object
from engine.models.registry import ARCHITECTURES, Architecture, find_architecture
from engine.models.rope import parse_rope

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16", "float16")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and settings of one model. Immutable.

    Attributes:
        architecture: key of `engine.models.registry.ARCHITECTURES`.
        max_position_embeddings: of the checkpoint; see `context_length` for serving.
        sliding_windows: per layer, positions that a token sees, its own included; None: all.
        rope: rotary embedding and its scaling.
        dtype: type the checkpoint was saved in: float32, bfloat16 or float16.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        eos_token_ids: ids that end a sequence, possibly none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    rope: Rope
    dtype: str
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, path: Path) -> ModelConfig:
        """Read `config.json` in the checkpoint folder `path`.

        Raises:
            UnsupportedError: an architecture or feature that Trident does not serve.
            CheckpointError: the file or a field of it is missing or wrong.
        """
        fields = Fields(read_json_object(path / "config.json"), name="config.json")
        names = fields.texts("architectures")
        if names is None:
            raise fields.error("architectures", "is missing")
        name = find_architecture(names)
        _refuse_unsupported(fields)
        return _parse(fields, name, ARCHITECTURES[name])

    @property
    def context_length(self) -> int:
        """Context length in tokens, rope scaling included."""
        match self.rope:
            case LinearRope(factor=factor) | DynamicRope(factor=factor):
                return int(self.max_position_embeddings * factor)
            case YarnRope(factor=factor, original_max_positions=original):
                return max(self.max_position_embeddings, int(original * factor))
            case _:
                return self.max_position_embeddings

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token, all layers, in a cache of `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _refuse_unsupported(fields: Fields) -> None:
    """Raise `UnsupportedError` for features that would change the output if ignored."""
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise UnsupportedError(
            f"config.json: hidden_act: {activation!r} is not supported; supported: silu"
        )
    for field in ("quantization_config", "dual_chunk_attention_config"):
        if field in fields:
            raise UnsupportedError(f"config.json: {field} is not supported by this version")


def _parse(fields: Fields, name: str, architecture: Architecture) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings")
    attention_bias = architecture.attention_bias and fields.boolean("attention_bias", default=False)
    config = ModelConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=_head_dim(fields, architecture, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=max_positions,
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        rope=parse_rope(fields, max_positions=max_positions),
        dtype=_dtype(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=architecture.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture.mlp_bias and fields.boolean("mlp_bias", default=False),
        eos_token_ids=fields.integers("eos_token_id"),
    )
    if any(not 0 <= token < config.vocab_size for token in config.eos_token_ids):
        raise fields.error("eos_token_id", f"must be below vocab_size {config.vocab_size}")
    return config


def _num_kv_heads(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    absent = num_heads if fields.is_null("num_key_value_heads") else architecture.num_kv_heads
    num_kv_heads = fields.integer("num_key_value_heads", default=absent or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"must divide num_attention_heads ({num_heads} % {num_kv_heads} != 0)",
        )
    return num_kv_heads


def _head_dim(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if "head_dim" not in fields and architecture.head_dim is None and hidden_size % num_heads:
        raise fields.error(
            "head_dim", f"is missing, and hidden_size is no multiple of {num_heads} heads"
        )
    head_dim = fields.integer("head_dim", default=architecture.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings (got {head_dim})")
    return head_dim


def _sliding_windows(
    fields: Fields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    absent = None if fields.is_null("sliding_window") else architecture.sliding_window
    window = fields.integer("sliding_window", default=absent)
    first = 0
    if architecture.window_switch:
        if not fields.boolean("use_sliding_window", default=False):
            window = None
        first = fields.integer("max_window_layers", default=28, minimum=0)
    elif architecture.sliding_window is None and window is not None:
        raise UnsupportedError("config.json: sliding_window is not supported for this architecture")
    windows = tuple(window if layer >= first else None for layer in range(num_layers))
    layer_types = fields.texts("layer_types")
    if layer_types is None:
        return windows
    if len(layer_types) != num_layers or not set(layer_types) <= set(_LAYER_TYPES):
        raise fields.error(
            "layer_types",
            f"must give one of {', '.join(_LAYER_TYPES)} for each of {num_layers} layers",
        )
    typed = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if not architecture.window_switch and typed != windows:
        raise UnsupportedError("config.json: layer_types is not supported for this architecture")
    return typed


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32"))
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedError(
            f"config.json: dtype: {name!r} is not supported; supported: {', '.join(_DTYPES)}"
        )
    return name
