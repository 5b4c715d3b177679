"""Scales of an fp8 KV cache, found in some checkpoints under tool-specific names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from engine.checkpoint.tensor_files.elements import read_tensor
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.errors import CheckpointError
from engine.layers.attention import Attention
from engine.models.tensor_names import TensorNames
from engine.weights.matching import require_float

# Tensor name relative to a layer's attention -> the `Attention` buffers that it fills.
_TARGETS: dict[str, tuple[str, ...]] = {
    **{
        name.format(x=x): (f"{x}_scale",)
        for x in "kv"
        for name in (
            "{x}_scale",  # llm-compressor
            "attn.{x}_scale",  # vLLM
            "{x}_proj.{x}_scale",  # ModelOpt
            "{x}_proj.output_scale",  # AutoFP8, Quark
        )
    },
    "kv_scale": ("k_scale", "v_scale"),  # early AutoFP8
    # Scales of queries and probabilities, which are not quantised here.
    **dict.fromkeys(
        (
            *("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale"),
            *("prob_scale", "attn.prob_scale", "prob_output_scale"),
        ),
        (),
    ),
}
_ATTENTION = ".self_attn."


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor of that name is an fp8 scale of attention."""
    return _ATTENTION in name and name.partition(_ATTENTION)[2] in _TARGETS


def load_kv_scales(model: nn.Module, scales: Sequence[StoredTensor], names: TensorNames) -> None:
    """Set the KV scales of the attention layers of `model` from its checkpoint.

    Args:
        names: how the checkpoint names our modules.
        scales: each with one element, or with one per KV head of its layer.

    Raises:
        CheckpointError: a scale is not positive, has another size, belongs to no layer of the
            model, occurs twice or cannot be read; the model is then unchanged.
    """
    modules = {
        names.of(path, prefix): module
        for path, module in model.named_modules()
        for prefix in names.prefixes
    }
    values: dict[str, tuple[Tensor, Tensor]] = {}
    for stored in scales:
        prefix, _, suffix = stored.name.partition(_ATTENTION)
        path = prefix + _ATTENTION[:-1]
        attention = modules.get(path)
        if not isinstance(attention, Attention):
            raise CheckpointError(f"{stored.name}: is of a layer that config.json does not have")
        for target in _TARGETS[suffix]:
            if f"{path}.{target}" in values:
                raise CheckpointError(f"{stored.name}: comes beside another {path}.{target}")
            place = attention.get_buffer(target)
            values[f"{path}.{target}"] = place, _read(stored, len(place))
    for place, value in values.values():
        place.copy_(value)


def _read(stored: StoredTensor, num_kv_heads: int) -> Tensor:
    """Return a scale as float32 [num_kv_heads]."""
    require_float(stored)
    if stored.num_elements not in (1, num_kv_heads):
        raise CheckpointError(
            f"{stored.name}: has shape {list(stored.shape)}; must be one scale, or one for each of "
            f"{num_kv_heads} KV heads"
        )
    value = read_tensor(stored).flatten().float()
    if not bool((value.isfinite() & (value > 0)).all()):
        raise CheckpointError(f"{stored.name}: must be positive (got {value.tolist()})")
    return value.expand(num_kv_heads)
