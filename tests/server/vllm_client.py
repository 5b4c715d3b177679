"""What a client of vllm_backend does, with tritonclient and nothing of ours.

Several prompts on one gRPC stream, told apart by request id; sampling parameters as strings, both
in the tensor `sampling_parameters` and as request parameters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

Result = dict[str, np.ndarray | None]
OUTPUTS = (
    *("text_output", "finish_reason", "cumulative_logprob", "logprobs"),
    *("num_input_tokens", "num_output_tokens"),
)


def run(
    url: str,
    model: str,
    prompts: Sequence[str],
    parameters: dict[str, str],
    *,
    stream: bool = False,
    as_tensor: bool = True,
    **flags: bool,
) -> dict[str, list[Result]]:
    """Return the responses to each prompt, by request id ("0", "1", ...).

    Args:
        url: of the server's gRPC service.
        model: the name of the model.
        prompts: sent on one stream.
        parameters: `SamplingParams` fields as text.
        stream: ask for a response per chunk.
        as_tensor: send `parameters` as the tensor `sampling_parameters` too.
        flags: further BOOL inputs.
    """
    return asyncio.run(_run(url, model, prompts, parameters, stream, as_tensor, flags))


async def _run(
    url: str,
    model: str,
    prompts: Sequence[str],
    parameters: dict[str, str],
    stream: bool,
    as_tensor: bool,
    flags: dict[str, bool],
) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {str(i): [] for i in range(len(prompts))}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number, prompt in enumerate(prompts):
            inputs = [
                _tensor("text_input", "BYTES", prompt.encode()),
                _tensor("stream", "BOOL", stream),
            ]
            if as_tensor:
                inputs.append(
                    _tensor("sampling_parameters", "BYTES", json.dumps(parameters).encode())
                )
            inputs += [_tensor(name, "BOOL", value) for name, value in flags.items()]
            yield {
                "model_name": model,
                "inputs": inputs,
                "request_id": str(number),
                "parameters": parameters,
            }

    async with grpcclient.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests(), stream_timeout=60):
            if error is not None:
                raise error
            results[result.get_response().id].append(
                {name: result.as_numpy(name) for name in OUTPUTS}
            )
    return results


def _tensor(name: str, datatype: str, value: Any) -> Any:
    tensor = grpcclient.InferInput(name, [1], datatype)
    dtype = np.object_ if datatype == "BYTES" else np.bool_
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor
