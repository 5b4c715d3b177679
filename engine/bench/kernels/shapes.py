"""The shapes of the measured models, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_BYTES = 2  # of a bfloat16

# Fields of config.json that the models of a family share.
LLAMA_FAMILY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
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
    "tie_word_embeddings": False,
}
QWEN_FAMILY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with weights and cache in bfloat16, as its `config.json` describes it.

    Attributes:
        label: its name in commands and figures.
        name: of the published model that has this shape.
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
    family: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            **self.family,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
        }

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each matrix of a layer, by the name of its module."""
        query = self.heads * self.head_dim
        return {
            "qkv_proj": (query + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_up_proj": (2 * self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.projections.values())

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head, which is also the embedding if both are tied."""
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token."""
        return 2 * _BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Operations of all layers per query and key."""
        return 4 * self.layers * self.heads * self.head_dim


QWEN_0_5B = Shape("0.5b", "Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, QWEN_FAMILY)
QWEN_1_5B = Shape("1.5b", "Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, QWEN_FAMILY)
LLAMA_8B = Shape("8b", "Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, LLAMA_FAMILY)
SHAPES = (QWEN_0_5B, LLAMA_8B, QWEN_1_5B)
# Checks within seconds that everything works, also on a CPU; its figures are meaningless.
TINY = Shape(
    *("tiny", "two small layers", 2, 64, 128, 2, 1, 32, 600),
    {**QWEN_FAMILY, "bos_token_id": 599, "eos_token_id": 599},
)
