"""The small models that are replayed: together they launch every kernel of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from engine.bench.shapes import LLAMA_FAMILY, QWEN_FAMILY, Shape

_TINY_VOCAB = 600


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """A model and how it is served.

    Attributes:
        longest: tokens of the longest prompt.
        requests: at most, at the start of an episode.
        settings: of the engine.
    """

    shape: Shape
    longest: int
    requests: int = 24
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The first word of its seeds."""
        return self.shape.label


def _shape(
    label: str, heads: int, kv_heads: int, head_dim: int, vocab: int, family: dict[str, Any]
) -> Shape:
    return Shape(
        label,
        f"replayed model {label}",
        layers=2,
        hidden=heads * head_dim,
        inner=2 * heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=8192,
        tied=family["model_type"] == "qwen2",
        bias=family["model_type"] == "qwen2",
        family={**family, "bos_token_id": 0, "eos_token_id": 0},
    )


# Few blocks, so that sequences are preempted.
_MODELS = (
    # Long contexts, so that several programs share a sequence's keys.
    ReplayModel(
        _shape("gqa", 8, 2, 64, 4096, LLAMA_FAMILY),
        longest=6000,
        settings={
            "max_model_len": 6144,
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 1 + 1200,
        },
    ),
    # A large vocabulary, so that several programs share a row of logits.
    ReplayModel(
        _shape("vocab", 14, 2, 64, 151936, QWEN_FAMILY),
        longest=600,
        settings={
            "max_model_len": 768,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 1 + 300,
        },
    ),
    ReplayModel(
        _shape("fp8", 8, 4, 128, 4096, LLAMA_FAMILY),
        longest=1500,
        settings={
            "max_model_len": 1664,
            "max_num_batched_tokens": 640,
            "num_gpu_blocks_override": 1 + 400,
            "kv_cache_dtype": "fp8",
            "block_size": 32,
            "swap_space": 2**-4,
        },
    ),
    ReplayModel(
        _shape(
            "window",
            *(8, 1, 128, 4096),
            {
                **LLAMA_FAMILY,
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": 200,
            },
        ),
        longest=1500,
        settings={
            "max_model_len": 1664,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 1 + 300,
            "dtype": "float16",
        },
    ),
)


def models(*, tiny: bool = False) -> dict[str, ReplayModel]:
    """Return the models by label; the tiny ones take milliseconds per step on a CPU."""
    return {model.label: _tiny(model) if tiny else model for model in _MODELS}


def _tiny(model: ReplayModel) -> ReplayModel:
    settings = {**model.settings, "max_model_len": 128, "max_num_batched_tokens": 48}
    settings |= {"num_gpu_blocks_override": 1 + 40, "block_size": 16, "kv_cache_dtype": "auto"}
    return replace(
        model,
        shape=replace(model.shape, vocab=_TINY_VOCAB),
        longest=40,
        requests=6,
        settings=settings,
    )
