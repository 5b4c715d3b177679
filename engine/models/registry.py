"""The architectures that Trident serves. Importing this imports neither torch nor their modules."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where an architecture is implemented, and the defaults of its `config.json`.

    Attributes:
        module: defines the class that has the architecture's name.
        num_kv_heads, head_dim: defaults; None derives them from num_heads.
        sliding_window: default.
        window_switch: a window applies only with `use_sliding_window`, from layer
            `max_window_layers` on or as `layer_types` says.
        attention_bias, mlp_bias: whether the field of this name is read. Without `attention_bias`,
            `qkv_bias` says whether q, k and v have a bias; nothing else has one.
    """

    module: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    window_switch: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("engine.models.llama", attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Architecture(
        "engine.models.mistral", num_kv_heads=8, sliding_window=4096
    ),
    "Qwen2ForCausalLM": Architecture(
        "engine.models.qwen2",
        num_kv_heads=32,
        sliding_window=4096,
        window_switch=True,
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Architecture(
        "engine.models.qwen3",
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        window_switch=True,
        attention_bias=True,
    ),
}


def find_architecture(names: list[str]) -> str:
    """Return the first of a checkpoint's architectures that Trident serves.

    Raises:
        UnsupportedError: it serves none of them.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise UnsupportedError(
        f"config.json: architectures: {', '.join(names) or 'none'} is not supported; "
        f"supported: {', '.join(ARCHITECTURES)}"
    )
