"""The inputs of the `engine` model: the tokenizer stage's, or a client's that tokenises itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import RequestError, UnsupportedError
from engine.protocol.messages import Ready, ResponseOptions
from engine.protocol.token_ids import TokenIds
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import (
    client_parameters,
    parse_sampling_parameters,
    read_priority,
    take_cache_salt,
    take_tenant,
)
from engine.service.sampling_inputs import (
    any_boolean,
    end_fields,
    refuse_unsupported,
    renamed,
    sampling_tensors,
)
from engine.service.stub.stream import NewRequest
from engine.service.tensors import InputReader, Tensors
from engine.text.grammar.request_formats import GUIDE, GUIDE_TYPE, guided_decoding
from engine.validation.checks import check_token_ids
from engine.validation.limits import (
    MAX_PREFIX_BYTES,
    MAX_REQUEST_ID_CHARACTERS,
    check_length,
    check_size,
    max_prompt_characters,
)

_MAX_OUTPUTS_BYTES = 1024  # of `ResponseOptions` beside the prompt
_MAX_AGE_S = 3600.0  # of a request that leaves the tokenizer stage


@dataclass(frozen=True)
class EngineInputs:
    """A request for the engine.

    `options` comes from the tokenizer stage; None: a client called the engine itself.
    """

    request: NewRequest
    skip_special_tokens: bool
    options: ResponseOptions | None


def parse_engine_inputs(
    tensors: Tensors,
    parameters: Mapping[str, Any],
    timeout_us: int,
    ready: Ready,
    *,
    request_id: str = "",
    tenant_key: str | None = None,
) -> EngineInputs:
    """Read the inputs of one request to the engine.

    Args:
        ready: carries the limits.
        tenant_key: the setting: without it in the request, its tenant does not count.

    Raises:
        RequestError: an input is wrong; the text names it.
    """
    inputs = InputReader(tensors)
    if "input_ids" not in inputs:
        raise RequestError("is missing", param="input_ids")
    check_length("input_ids", inputs.size("input_ids"), None, ready.max_model_len)
    check_size("request id", len(request_id), MAX_REQUEST_ID_CHARACTERS, "characters")
    prompt = _prompt(inputs, ready)
    decoded = parse_options(tensors, 4 * max_prompt_characters(ready.max_model_len))
    # The tokenizer stage has merged all other inputs already, defaults and all.
    fields, names = _client_fields(inputs, parameters) if decoded is None else ({}, {})
    fields.update(parse_sampling_parameters(inputs.string("sampling_parameters") or "{}"))
    cache_salt, tenant = take_cache_salt(fields), take_tenant(fields)
    try:
        params = SamplingParams.parse(fields)
        asked = params.max_tokens if "max_tokens" in fields else None
        check_length("input_ids", len(prompt), asked, ready.max_model_len)
    except RequestError as error:
        raise renamed(error, names) from None
    if decoded is None:
        params = _checked_client(inputs, params, ready)
    text_prefix = decoded.text_prefix if decoded else ""
    _check_prefix(text_prefix, params.n)
    stream = any_boolean(inputs, "stream", "streaming") or False
    timeout_us = inputs.integer("timeout") or timeout_us
    return EngineInputs(
        request=NewRequest(
            prompt_token_ids=prompt,
            sampling_params=params.model_dump(exclude_defaults=True),
            num_sequences=params.n,
            num_dropped=params.num_sequences - params.n,
            stream=stream,
            priority=read_priority(inputs),
            cache_salt=cache_salt,
            tenant=tenant.trusted(tenant_key),
            timeout_s=timeout_us / 1e6 if timeout_us else None,
            text_prefix=text_prefix,
            request_id=request_id,
            arrival_time=_arrival_time(decoded),
        ),
        skip_special_tokens=params.skip_special_tokens,
        options=decoded,
    )


def _prompt(inputs: InputReader, ready: Ready) -> TokenIds:
    """Return `input_ids`, as many as `input_lengths`, if it is there: others are padding."""
    prompt = inputs.token_ids("input_ids", ready.max_model_len)
    length = inputs.integer("input_lengths")
    if length is None:
        return prompt
    if not 1 <= length <= len(prompt):
        raise RequestError(
            f"must be 1 to the {len(prompt)} tokens of input_ids (got {length})",
            param="input_lengths",
        )
    return prompt[:length]


def _client_fields(
    inputs: InputReader, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling parameters of a client that calls the engine, and `renamed`'s names."""
    refuse_unsupported(inputs)
    if inputs.boolean("exclude_input_in_output") is False:
        raise UnsupportedError(
            "must be true: token_ids hold the output alone; to get the prompt too, call the "
            "ensemble",
            param="exclude_input_in_output",
        )
    fields, names = sampling_tensors(inputs)
    if inputs.boolean("return_log_probs"):
        fields["logprobs"] = 0  # the chosen token's
    grammar = guided_decoding(inputs.string(GUIDE_TYPE) or "", inputs.string(GUIDE) or "")
    if grammar is not None:
        fields[GUIDE] = grammar
    return {**fields, **client_parameters(parameters)}, names


def _checked_client(inputs: InputReader, params: SamplingParams, ready: Ready) -> SamplingParams:
    """Return the parameters of a client that calls the engine, with its `end_id`."""
    if params.return_sections:
        raise RequestError(
            "needs detokenised output; call the ensemble model", param="return_sections"
        )
    if params.truncate_prompt_tokens is not None:
        raise RequestError(
            "is applied by the tokenizer stage; truncate input_ids yourself, or call the ensemble",
            param="truncate_prompt_tokens",
        )
    end_id = inputs.integer("end_id")
    if end_id is None:
        return params
    check_token_ids("end_id", {end_id} - {-1}, ready.vocab_size)
    return params.model_copy(update=end_fields(end_id, params))


def check_stop_id(request_id: str) -> None:
    """Check the id of a request that stops others.

    Raises:
        RequestError: it has none, or one that no request can have.
    """
    if not request_id:
        raise RequestError("needs a request id: that of the request to cancel", param="stop")
    check_size("request id", len(request_id), MAX_REQUEST_ID_CHARACTERS, "characters")


def _arrival_time(options: ResponseOptions | None) -> float:
    """Return when the request entered the first stage; now, if that is unknown or cannot be."""
    now = time.monotonic()
    entered = options.arrival_time if options is not None else None
    return entered if entered is not None and now - _MAX_AGE_S <= entered <= now else now


def _check_prefix(text_prefix: str, n: int) -> None:
    if (size := n * len(text_prefix.encode())) > MAX_PREFIX_BYTES:
        raise RequestError(
            f"the prompt before each of {n} outputs takes {size} bytes; "
            f"at most {MAX_PREFIX_BYTES} are allowed",
            param="exclude_input_in_output",
        )


def parse_options(tensors: Tensors, max_prefix_bytes: int) -> ResponseOptions | None:
    """Return the tokenizer stage's options for the responses; None if a client calls the engine.

    Raises:
        RequestError: it is not the tokenizer stage's.
    """
    data = InputReader(tensors).octets("response_options", max_prefix_bytes + _MAX_OUTPUTS_BYTES)
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=ResponseOptions)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError(
            "is set by the tokenizer stage; leave it out", param="response_options"
        ) from None
