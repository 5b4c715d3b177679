"""Trident's engine: continuous batching over a paged KV cache.

`from engine import LLM, SamplingParams` is the offline API. The names are imported when they are
first used: the server's stages need parts of this package without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.offline.llm import LLM
    from engine.offline.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from engine.request.sampling_params import SamplingParams
    from engine.text.output_parsing.parser import Section

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "Section",
]

_MODULES = {
    "LLM": "engine.offline.llm",
    "CompletionOutput": "engine.offline.outputs",
    "EmbeddingOutput": "engine.offline.outputs",
    "EmbeddingRequestOutput": "engine.offline.outputs",
    "Logprob": "engine.offline.outputs",
    "RequestOutput": "engine.offline.outputs",
    "SamplingParams": "engine.request.sampling_params",
    "Section": "engine.text.output_parsing.parser",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
