"""The inputs of the `engine` model: the tokenizer stage's, or a client's that tokenises itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import RequestError
from engine.limits import check_length
from engine.sampling_params import SamplingParams
from engine.service.delivery import NewRequest
from engine.service.messages import Ready, ResponseOptions
from engine.service.request_inputs import client_parameters, parse_sampling_parameters
from engine.service.tensors import InputReader, Tensors


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
) -> EngineInputs:
    """Read the inputs of one request to the engine; `ready` carries the limits.

    Raises:
        RequestError: an input is wrong; the text names it.
    """
    inputs = InputReader(tensors)
    if "input_ids" not in inputs:
        raise RequestError("input_ids: is missing")
    prompt = inputs.integers("input_ids")
    decoded = parse_options(tensors)
    # The tokenizer stage has merged the request parameters already, defaults and all.
    fields = client_parameters(parameters) if decoded is None else {}
    fields.update(parse_sampling_parameters(inputs.string("sampling_parameters") or "{}"))
    params = SamplingParams.parse(fields)
    asked = params.max_tokens if "max_tokens" in fields else None
    check_length("input_ids", len(prompt), asked, ready.max_model_len)
    stream = inputs.boolean("stream") or False
    timeout_us = inputs.integer("timeout") or timeout_us
    return EngineInputs(
        request=NewRequest(
            prompt_token_ids=prompt,
            sampling_params=params.model_dump(exclude_defaults=True),
            num_sequences=params.n,
            stream=stream,
            priority=inputs.integer("priority") or 0,
            timeout_s=timeout_us / 1e6 if timeout_us else None,
            text_prefix=decoded.text_prefix if decoded else "",
            request_id=request_id,
        ),
        skip_special_tokens=params.skip_special_tokens,
        options=decoded,
    )


def parse_options(tensors: Tensors) -> ResponseOptions | None:
    """Return what the tokenizer stage says of the responses; None if a client calls the engine.

    Raises:
        RequestError: it is not the tokenizer stage's.
    """
    data = InputReader(tensors).octets("response_options")
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=ResponseOptions)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("response_options: is for the tokenizer stage; leave it out") from None
