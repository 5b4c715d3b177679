"""The inputs of the ensemble, by TensorRT-LLM's and by vLLM's conventions, as one typed request.

TensorRT-LLM's clients send one tensor per setting. vLLM's send `sampling_parameters`, a JSON
object, or its fields as request parameters. Where several name a setting, the JSON object wins,
then the request parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.protocol.messages import NULL_LOGPROBS
from engine.protocol.token_ids import TokenIds
from engine.service.parameters import (
    Tenant,
    client_parameters,
    parse_sampling_parameters,
    read_priority,
    take_cache_salt,
    take_tenant,
)
from engine.service.sampling_inputs import any_boolean, refuse_unsupported, sampling_tensors
from engine.service.tensors import InputReader, Tensors
from engine.text.chat_parameters import ChatParameters
from engine.text.grammar.request_formats import GUIDE, GUIDE_TYPE, guided_decoding
from engine.validation.limits import MAX_PROMPT_TOKENS, MAX_WORDS, check_words

_EXCLUDE_INPUT = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")

_PERFORMANCE = (
    *("kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"),
    *("last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens"),
    "total_draft_tokens",
)
# Flag -> the optional outputs that it asks for.
_FLAGS = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_num_cached_tokens": ("num_cached_tokens",),
    "return_perf_metrics": _PERFORMANCE,
    "sampling_param_return_perf_metrics": _PERFORMANCE,
}


@dataclass(frozen=True)
class RequestInputs:
    """The inputs of a request, before tokenisation.

    Attributes:
        text, messages, input_ids: the prompt; exactly one of them.
        chat: what the chat template gets beside the messages.
        fields: of `SamplingParams`, not yet validated.
        names: the inputs that those fields came from, where their names differ.
        exclude_input_in_output: None if the client did not set it.
        end_id: replaces the checkpoint's end-of-sequence tokens; -1: there is none.
        embedding_bias: words, and what to add to the logits of their tokens.
        priority: smaller runs earlier.
        cache_salt: only requests with the same salt share cached prefixes.
        tenant: shares the engine equally with the others, if its key is the server's.
        timeout_us: from now, in microseconds; 0 means none.
        outputs: optional output tensors.
    """

    text: str | None
    messages: str | None
    input_ids: TokenIds | None
    chat: ChatParameters
    fields: Mapping[str, Any]
    names: Mapping[str, str]
    stream: bool
    exclude_input_in_output: bool | None
    end_id: int | None
    embedding_bias: tuple[tuple[str, float], ...]
    priority: int
    cache_salt: str
    tenant: Tenant
    timeout_us: int
    outputs: tuple[str, ...]


def parse_inputs(
    tensors: Tensors, parameters: Mapping[str, Any], timeout_us: int = 0
) -> RequestInputs:
    """Read the inputs of one request.

    Args:
        tensors: by name, shaped [1] or [1, 1], lists [N] or [1, N].
        parameters: the request parameters; scalars.
        timeout_us: of the Triton request, used if there is no input `timeout`; 0 means none.

    Raises:
        UnsupportedError: an input that Trident does not take.
        RequestError: anything else is wrong; the text names the input.
    """
    inputs = InputReader(tensors)
    refuse_unsupported(inputs)
    grammar = guided_decoding(inputs.string(GUIDE_TYPE) or "", inputs.string(GUIDE) or "")
    text, messages = inputs.string("text_input"), inputs.string("messages")
    input_ids = inputs.token_ids("input_ids", MAX_PROMPT_TOKENS) if "input_ids" in inputs else None
    _check_one_prompt({"text_input": text, "messages": messages, "input_ids": input_ids})
    chat = inputs.string("chat_parameters") or ""
    if chat and messages is None:
        raise RequestError("needs messages", param="chat_parameters")
    tensor_fields, names = sampling_tensors(inputs)
    merged = {**tensor_fields, **_sampling_parameters(inputs, parameters), GUIDE: grammar}
    # null asks for the default, except that no limit of max_tokens is a value of its own.
    fields = {k: v for k, v in merged.items() if v is not None or k == "max_tokens"}
    cache_salt, tenant = take_cache_salt(fields), take_tenant(fields)
    echo = _take_echo(fields)
    if echo and fields.get("logprobs") is not None:
        fields.setdefault("prompt_logprobs", fields["logprobs"])
    outputs = requested_outputs(inputs)
    if fields.get("prompt_logprobs") is not None:
        outputs.append("prompt_logprobs")
        if "output_log_probs" in outputs:
            outputs.append("prompt_log_probs")
    return_logprobs = inputs.boolean("return_logprobs")
    if fields.get("logprobs") is None:
        if return_logprobs:
            outputs.append(NULL_LOGPROBS)
        if {"cum_log_probs", "cumulative_logprob"} & set(outputs):
            fields["logprobs"] = 0  # the chosen token's
    elif return_logprobs:
        outputs.append("logprobs")
    _check_at_least("pad_id", inputs.integer("pad_id"), 0)  # without effect: nothing is padded
    return RequestInputs(
        text=text,
        messages=messages,
        input_ids=input_ids,
        chat=ChatParameters.parse(chat),
        fields=fields,
        names=names,
        stream=any_boolean(inputs, "stream", "streaming") or False,
        exclude_input_in_output=(
            any_boolean(inputs, *_EXCLUDE_INPUT) if echo is None else not echo
        ),
        end_id=_check_at_least("end_id", inputs.integer("end_id"), -1),
        embedding_bias=_embedding_bias(inputs),
        priority=read_priority(inputs),
        cache_salt=cache_salt,
        tenant=tenant,
        timeout_us=_check_at_least("timeout", inputs.integer("timeout"), 1) or timeout_us,
        outputs=tuple(outputs),
    )


def requested_outputs(inputs: InputReader) -> list[str]:
    """Return the optional outputs that the `return_...` inputs ask for."""
    asked = (name for flag in _FLAGS if inputs.boolean(flag) for name in _FLAGS[flag])
    return list(dict.fromkeys(asked))


def _check_one_prompt(prompts: Mapping[str, str | TokenIds | None]) -> None:
    given = [name for name, prompt in prompts.items() if prompt is not None]
    if len(given) > 1:
        raise RequestError("give only one prompt; leave out the others", param=given)
    if not given:
        raise RequestError(
            "is missing (give text_input, messages or input_ids)", param="text_input"
        )
    prompt = prompts[given[0]]
    if prompt is not None and len(prompt) == 0:
        raise RequestError("must not be empty", param=given[0])


def _sampling_parameters(inputs: InputReader, parameters: Mapping[str, Any]) -> dict[str, Any]:
    fields = client_parameters(parameters)
    text = inputs.string("sampling_parameters")
    if text:
        fields.update(parse_sampling_parameters(text))
    return fields


def _take_echo(fields: dict[str, Any]) -> bool | None:
    """Remove `echo` of OpenAI's completions from `fields`; None if it is absent.

    Raises:
        RequestError: it is neither true nor false.
    """
    echo = fields.pop("echo", None)
    if isinstance(echo, str):
        echo = {"true": True, "false": False}.get(echo.lower(), echo)
    if echo is not None and not isinstance(echo, bool):
        raise RequestError("must be true or false", param="echo")
    return echo


def _embedding_bias(inputs: InputReader) -> tuple[tuple[str, float], ...]:
    words = inputs.strings("embedding_bias_words", MAX_WORDS)
    check_words("embedding_bias_words", words)
    weights = inputs.numbers("embedding_bias_weights", MAX_WORDS)
    if not words and all(weight == 0 for weight in weights):
        return ()
    if len(words) != len(weights):
        raise RequestError(
            f"must have one weight per word of embedding_bias_words "
            f"({len(weights)} weights, {len(words)} words)",
            param="embedding_bias_weights",
        )
    return tuple(zip(words, weights, strict=True))


def _check_at_least(name: str, value: int | None, minimum: int) -> int | None:
    if value is not None and value < minimum:
        raise RequestError(f"must be at least {minimum} (got {value})", param=name)
    return value
