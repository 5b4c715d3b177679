"""Input tensors that set sampling parameters, in the names of each server's clients.

And those that these clients are known to send and no stage takes. Triton would refuse what is in no
configuration, without saying what to use. So they are in the configurations, and refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import RequestError, UnsupportedError
from engine.request.sampling_params import SamplingParams
from engine.service.tensors import InputReader
from engine.validation.limits import MAX_BEAM_WIDTH, MAX_WORDS

# Tensor -> field of SamplingParams; later ones win, so aliases stand first. TensorRT-LLM names
# `sampling_param_...` for its LLM API, `runtime_...`, `len_penalty` and `request_output_len` for
# its model `tensorrt_llm`.
_INTEGERS = {
    "sampling_param_max_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "max_tokens": "max_tokens",
    "min_length": "min_tokens",
    "min_tokens": "min_tokens",
    "random_seed": "seed",
    "sampling_param_seed": "seed",
    "seed": "seed",
    "sampling_param_top_k": "top_k",
    "runtime_top_k": "top_k",
    "top_k": "top_k",
    "sampling_param_best_of": "best_of",
    "num_return_sequences": "n",
    "beam_width": "beam_width",
}
_NUMBERS = {
    "sampling_param_temperature": "temperature",
    "temperature": "temperature",
    "sampling_param_top_p": "top_p",
    "runtime_top_p": "top_p",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "presence_penalty": "presence_penalty",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "frequency_penalty": "frequency_penalty",
    "len_penalty": "length_penalty",
    "length_penalty": "length_penalty",
}
_SWITCHES = {"return_sections": "return_sections", "early_stopping": "early_stopping"}
_WORDS = {"sampling_param_stop": "stop", "stop_words": "stop", "bad_words": "bad_words"}

_NO_MEDIA = "only text input is supported; leave it out"
_ADAPTER = "a LoRA adapter is chosen when the server starts: trident serve ADAPTER"
_DRAFTS = "leave it out; draft tokens come from the server's setting speculative_config"
_NO_ENCODER = "encoder-decoder models are not supported; leave it out"
_NO_TUNING = "prompt tuning is not supported; leave it out"
_NO_RETENTION = "cached blocks are evicted by their last use alone; leave it out"
_NOT_DRAWN_SO = "is not supported; use top_p, top_k or min_p"

# Tensor -> what to do.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("image", "image_input", "image_bytes_input", "image_url_input", "image_url"), _NO_MEDIA
    ),
    "video_bytes_input": _NO_MEDIA,
    **dict.fromkeys(("lora_task_id", "lora_weights", "lora_config", "lora_id"), _ADAPTER),
    **dict.fromkeys(("lora_name", "lora_path", "lora_ckpt_source"), _ADAPTER),
    **dict.fromkeys(("num_draft_tokens", "use_draft_logits", "draft_input_ids"), _DRAFTS),
    **dict.fromkeys(("draft_logits", "draft_acceptance_threshold"), _DRAFTS),
    **dict.fromkeys(("lookahead_window_size", "lookahead_ngram_size"), _DRAFTS),
    "lookahead_verification_set_size": _DRAFTS,
    **dict.fromkeys(("decoder_text_input", "decoder_input_ids"), _NO_ENCODER),
    **dict.fromkeys(("decoder_input_lengths", "encoder_input_features"), _NO_ENCODER),
    **dict.fromkeys(("encoder_output_lengths", "cross_attention_mask"), _NO_ENCODER),
    "skip_cross_attn_blocks": _NO_ENCODER,
    **dict.fromkeys(("prompt_embedding_table", "prompt_vocab_size"), _NO_TUNING),
    **dict.fromkeys(("prompt_table_extra_id", "prompt_table_extra_ids"), _NO_TUNING),
    **dict.fromkeys(("mrope_rotary_cos_sin", "mrope_position_deltas"), _NO_MEDIA),
    **dict.fromkeys(("retention_token_range_starts", "retention_token_range_ends"), _NO_RETENTION),
    "retention_token_range_priorities": _NO_RETENTION,
    "retention_token_range_durations_ms": _NO_RETENTION,
    **dict.fromkeys(("retention_decode_priority", "retention_decode_duration_ms"), _NO_RETENTION),
    **dict.fromkeys(("runtime_top_p_min", "runtime_top_p_decay"), _NOT_DRAWN_SO),
    "runtime_top_p_reset_ids": _NOT_DRAWN_SO,
    "beam_search_diversity_rate": "diverse beam search is not supported; leave it out",
    "return_kv_cache_reuse_stats": "use return_perf_metrics",
    "context_phase_params": "prefill and decode share one engine; leave it out",
    "stop_words_list": "use stop_token_ids in sampling_parameters, or stop_words of the ensemble",
    "bad_words_list": "use bad_words in sampling_parameters",
    "embedding_bias": "use logit_bias in sampling_parameters",
    "embedding_request": "use return_embedding in sampling_parameters",
}


def refuse_unsupported(inputs: InputReader) -> None:
    """Check that no input is there that no stage takes.

    Raises:
        UnsupportedError: one is; the text names it, and what to use.
    """
    for name in ("return_context_logits", "return_generation_logits"):
        if inputs.boolean(name):
            raise UnsupportedError(
                "logits are not returned; use prompt_logprobs and logprobs in sampling_parameters "
                "to get log-probabilities",
                param=name,
            )
    for name in inputs:
        if name in REFUSED:
            raise UnsupportedError(
                f"not supported by this version of Trident; {REFUSED[name]}", param=name
            )


def sampling_tensors(inputs: InputReader) -> tuple[dict[str, Any], dict[str, str]]:
    """Return fields of SamplingParams, and the tensors of those that are named otherwise.

    Raises:
        RequestError: a tensor has the wrong type or shape.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    readers: list[tuple[Mapping[str, str], Callable[[str], Any]]] = [
        (_INTEGERS, inputs.integer),
        (_NUMBERS, inputs.number),
        (_SWITCHES, inputs.boolean),
        (_WORDS, lambda name: inputs.strings(name, MAX_WORDS)),
    ]
    for table, read in readers:
        for name, field in table.items():
            if name in inputs:
                fields[field] = read(name)
                names[field] = name
    if 1 < fields.get("beam_width", 1) <= MAX_BEAM_WIDTH:
        fields.setdefault("n", fields["beam_width"])  # TensorRT-LLM's default: all beams
    if fields.get("top_p", 1.0) <= 0:  # peers' clients send 0 for none
        del fields["top_p"]
    return fields, {field: name for field, name in names.items() if field != name}


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return `error` with fields named as the client named them, by `sampling_tensors`."""
    params, message = list(error.params), error.message
    for field, name in names.items():
        begin = rf"{field}(?![\w-])"
        params = [re.sub(rf"^{begin}", name, param) for param in params]
        message = re.sub(rf"; {begin}(?=[:.\[])", f"; {name}", message)  # of other fields
    return error.reworded(message, param=params)


def end_fields(end_id: int | None, params: SamplingParams) -> Mapping[str, Any]:
    """Return the fields of SamplingParams that make `end_id` the only end-of-sequence token.

    None: the client did not set it; -1: there is none.
    """
    if end_id is None:
        return {}
    own = () if end_id == -1 or params.ignore_eos else (end_id,)
    return {"ignore_eos": True, "stop_token_ids": (*params.stop_token_ids, *own)}


def any_boolean(inputs: InputReader, *names: str) -> bool | None:
    """Return the first of the inputs `names` that is there."""
    return next((inputs.boolean(name) for name in names if name in inputs), None)
