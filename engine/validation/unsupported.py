"""What vLLM and SGLang have and Trident does not (yet): refused by name, never silently ignored.

A value that asks for nothing, as a client or a start script writes it for the sake of completeness,
is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedError

# The values that count as unset, by name; None also counts as unset.
Neutral = Mapping[str, tuple[object, ...]]

# Of `SamplingParams`.
PARAMETERS: Neutral = {
    "detokenize": (True,),
    "extra_args": (),
    "flat_logprobs": (False,),
    "logprob_token_ids": (),
    "lora_name": (),
    "lora_request": (),
    "prompt_logprob_token_ids": (),
    "repetition_detection": (),
    "skip_clone": (False,),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (),
    "watermarking": (),
}

# Of `EngineConfig`, and of `vllm serve`.
SETTINGS: Neutral = {
    **dict.fromkeys(
        (
            *("disable_sliding_window", "enable_lora"),
            *("enable_log_outputs", "enable_log_requests", "enable_prompt_embeds"),
            *("enable_sleep_mode", "skip_tokenizer_init"),
        ),
        (False,),
    ),
    "allowed_local_media_path": ("",),
    "api_server_count": (1,),
    "code_revision": (),
    "compilation_config": (),
    "config_format": ("auto",),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    # Between GPUs; and a permission that nothing uses, as no code of a checkpoint is ever run.
    **dict.fromkeys(("disable_custom_all_reduce", "trust_remote_code"), (True, False)),
    "disable_log_requests": (True,),  # what is in a request is never logged
    "disable_log_stats": (True,),
    "distributed_executor_backend": ("uni", "mp"),  # how to start several workers
    "download_dir": (),
    "enable_auto_tool_choice": (True,),  # it is always offered
    "hf_token": (),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "max_num_partial_prefills": (1,),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto",),
    "pipeline_parallel_size": (1,),
    "response_role": ("assistant",),
    "revision": (),
    "rope_scaling": (),
    "rope_theta": (),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (),
    "uvicorn_log_level": ("info",),
}

# What does the same, by name.
_INSTEAD = {
    **dict.fromkeys(("rope_scaling", "rope_theta"), "set rope_parameters in hf_overrides"),
    **dict.fromkeys(("enable_lora", "lora_name", "lora_request"), "name an adapter as model"),
}

# Arguments of `LLM.generate` and `LLM.chat`.
ARGUMENTS: Neutral = {
    "chat_template_content_format": ("auto", "string"),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "priority": (),
    "tokenization_kwargs": ({},),
}


def without(fields: dict[str, Any], neutral: Neutral) -> dict[str, Any]:
    """Return `fields` without those of `neutral`.

    Raises:
        UnsupportedError: one of them asks for something.
    """
    if neutral.keys().isdisjoint(fields):
        return fields
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and not any(means(value, each) for each in values):
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise UnsupportedError(f"not supported by this version of Trident{instead}", param=name)
    return {name: value for name, value in fields.items() if name not in neutral}


def means(value: object, other: object) -> bool:
    """Whether `value` equals `other`, possibly as a string or as `1` for `1.0`."""
    try:
        return float(str(value)) == float(str(other))
    except ValueError:
        return str(value).lower() == str(other).lower()
