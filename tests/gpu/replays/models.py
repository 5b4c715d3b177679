"""The small models that are replayed: together they launch every kernel of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from engine.bench.kernels.shapes import LLAMA_FAMILY, QWEN_FAMILY, Shape


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


def _model(
    heads: tuple[int, int, int],
    longest: int,
    budget: int,
    blocks: int,
    *,
    label: str,
    vocab: int = 4096,
    family: dict[str, Any] = LLAMA_FAMILY,
    **settings: Any,
) -> ReplayModel:
    """Return a model of two layers: query heads, KV heads and their size, and what serves it."""
    num_heads, kv_heads, head_dim = heads
    hidden = num_heads * head_dim
    family = {**family, "bos_token_id": 0, "eos_token_id": 0}
    sizes = (2, hidden, 2 * hidden, num_heads, kv_heads, head_dim, vocab)
    settings["max_model_len"] = longest + 144
    settings["max_num_batched_tokens"] = budget
    # Few blocks, so that sequences are preempted; one of them is never used.
    settings["num_gpu_blocks_override"] = 1 + blocks
    shape = Shape(label, f"replayed model {label}", *sizes, family)
    return ReplayModel(shape, longest, settings=settings)


_WINDOW = {
    **LLAMA_FAMILY,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 200,
}
_MODELS = (
    # Long contexts, so that several programs share a sequence's keys.
    _model((8, 2, 64), 6000, 2048, 1200, label="gqa"),
    # A large vocabulary, so that several programs share a row of logits.
    _model((14, 2, 64), 600, 512, 300, label="vocab", vocab=151936, family=QWEN_FAMILY),
    _model(
        *((8, 4, 128), 1500, 640, 400),
        label="fp8",
        kv_cache_dtype="fp8",
        block_size=32,
        swap_space=2**-4,
    ),
    _model((8, 1, 128), 1500, 256, 300, label="window", family=_WINDOW, dtype="float16"),
)


def models(*, tiny: bool = False) -> dict[str, ReplayModel]:
    """Return the models by label; the tiny ones take milliseconds per step on a CPU."""
    return {model.label: _tiny(model) if tiny else model for model in _MODELS}


def _tiny(model: ReplayModel) -> ReplayModel:
    settings = {**model.settings, "max_model_len": 128, "max_num_batched_tokens": 48}
    settings |= {"num_gpu_blocks_override": 1 + 40, "block_size": 16, "kv_cache_dtype": "auto"}
    shape = replace(model.shape, vocab=600)
    return replace(model, shape=shape, longest=40, requests=6, settings=settings)
