"""The shapes of the measured models, and sizes derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BYTES = 2  # of a bfloat16

# Common fields of config.json.
LLAMA_FAMILY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN_FAMILY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as its `config.json` describes it; weights and cache are bfloat16.

    Attributes:
        label: its name in `--models`.
        name: of the published model that has this shape.
        bias: whether q, k and v have one.
    """

    label: str
    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool
    bias: bool
    family: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            **self.family,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }

    @property
    def family_name(self) -> str:
        """Its `model_type`."""
        name: str = self.family["model_type"]
        return name

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (qkv + self.heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head, which is also the embedding if both are tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, as the model card counts them."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        small = self.layers * (2 * self.hidden + (qkv if self.bias else 0)) + self.hidden
        heads = self.head_parameters * (1 if self.tied else 2)
        return self.layer_parameters + small + heads

    @property
    def step_bytes(self) -> int:
        """Bytes of the weight matrices that a decode step reads."""
        return _BYTES * (self.layer_parameters + self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token."""
        return 2 * _BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Operations of all layers per query and key."""
        return 4 * self.layers * self.heads * self.head_dim


QWEN_0_5B = Shape(
    "0.5b", "Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, 32768, True, True, QWEN_FAMILY
)
QWEN_1_5B = Shape(
    "1.5b", "Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, 131072, True, True, QWEN_FAMILY
)
LLAMA_8B = Shape(
    "8b", "Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False, False, LLAMA_FAMILY
)
# Checks within seconds that everything works, also on a CPU; its figures are meaningless.
TINY = Shape(
    "tiny",
    "two small layers",
    *(2, 64, 128, 2, 1, 32, 600, 512, True, True),
    {**QWEN_FAMILY, "bos_token_id": 599, "eos_token_id": 599},
)
SHAPES = (QWEN_0_5B, LLAMA_8B, QWEN_1_5B)
