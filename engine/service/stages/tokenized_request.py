"""TokenizedRequest: what the tokenizer stage hands to the engine, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol.messages import ResponseOptions
from engine.protocol.token_ids import TokenIds
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import Tenant
from engine.service.stages.request_inputs import requested_outputs
from engine.service.tensors import InputReader, Tensors


@dataclass(frozen=True)
class TokenizedRequest:
    """A validated request for the engine. `timeout_us` 0 means no deadline."""

    input_ids: TokenIds
    sampling_params: SamplingParams
    stream: bool
    priority: int
    cache_salt: str
    tenant: Tenant
    timeout_us: int
    options: ResponseOptions


def engine_tensors(request: TokenizedRequest) -> dict[str, NDArray[Any]]:
    """Return `request` as input tensors of the engine, without a batch dimension."""
    params = request.sampling_params.model_dump(mode="json", exclude_defaults=True)
    others = {
        "cache_salt": request.cache_salt,
        "tenant": request.tenant.name,
        "tenant_key": request.tenant.key,
    }
    params |= {name: value for name, value in others.items() if value}
    options = msgspec.msgpack.encode(request.options)
    return {
        "input_ids": request.input_ids,
        "sampling_parameters": np.array([msgspec.json.encode(params)], dtype=object),
        "stream": np.array([request.stream]),
        "priority": np.array([request.priority], dtype=np.int32),
        "timeout": np.array([request.timeout_us], dtype=np.uint64),
        "response_options": np.frombuffer(options, dtype=np.uint8),
    }


def stop_tensors(tensors: Tensors) -> dict[str, NDArray[Any]] | None:
    """Return the engine's inputs for a request that stops others; None if it is no such request.

    Raises:
        RequestError: an input has the wrong type or shape.
    """
    inputs = InputReader(tensors)
    if not inputs.boolean("stop"):
        return None
    options = msgspec.msgpack.encode(ResponseOptions(outputs=requested_outputs(inputs)))
    return {
        "stop": np.array([True]),
        "response_options": np.frombuffer(options, dtype=np.uint8),
    }
