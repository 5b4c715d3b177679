"""The architectures that Trident serves, each with the file of its family. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.config import read_config
from engine.checkpoint.gguf.names import GGUF, spec_of_gguf
from engine.fields import Fields
from engine.models.spec import ModelSpec

# Architecture, as `config.json` names it -> file in `engine.models.families`.
FAMILIES = {
    "ArceeForCausalLM": "arcee",
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "CwmForCausalLM": "cwm",
    "Ernie4_5ForCausalLM": "ernie",
    "Ernie4_5_MoeForCausalLM": "ernie",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm",
    "Glm4MoeForCausalLM": "glm_moe",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeHybridForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "LlamaForCausalLM": "llama",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "Ministral3ForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen2VLForConditionalGeneration": "qwen_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
# Decoders that are stored alone, without a head.
DECODERS = {
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
}

_SERVED = FAMILIES | DECODERS


def read_model_spec(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read `config.json` in the checkpoint folder `path`, with `overrides` as in `read_config`.

    Raises:
        UnsupportedError: an architecture or feature that Trident does not serve.
        CheckpointError: the file or a field of it is missing or wrong.
    """
    fields = read_config(path, overrides)
    architecture = _find_architecture(fields)
    if "dual_chunk_attention_config" in fields:
        raise fields.unsupported("dual_chunk_attention_config", "is not supported by this version")
    if not fields.boolean("is_causal", default=True):
        raise fields.unsupported("is_causal", "false is not supported")
    family = importlib.import_module(f"engine.models.families.{_SERVED[architecture]}")
    spec: ModelSpec = family.parse(fields, architecture)
    return spec_of_gguf(spec) if (path / GGUF).exists() else spec


def _find_architecture(fields: Fields) -> str:
    """Return the first of a checkpoint's architectures that Trident serves."""
    names = fields.texts("architectures")
    if names is None:
        raise fields.error("architectures", "is missing")
    for name in names:
        if name in _SERVED:
            return name
    raise fields.unsupported(
        "architectures",
        f"{', '.join(names) or 'none'} is not supported; supported: {', '.join(_SERVED)}",
    )
