"""What a user of plain tritonclient does to get one answer over a gRPC stream."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from engine.launch.server import TritonServer


def infer_one(server: TritonServer, inputs: Mapping[str, object]) -> Any:
    """Return tritonclient's result of the only answer; each input is a text or a NumPy scalar."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    tensors = []
    for name, value in inputs.items():
        is_text = isinstance(value, str)
        array = np.array([[value.encode()]], dtype=object) if is_text else np.array([[value]])
        tensor = InferInput(name, [1, 1], np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    with InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", tensors)
        result, error = answers.get(timeout=60)
        client.stop_stream()
    assert error is None
    return result
