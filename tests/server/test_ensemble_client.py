"""Our clients on both forms of the model repository: answers, errors, deadlines."""

import asyncio
import json
from typing import NamedTuple

import pytest

from client import AsyncTridentClient, Completion, TridentClient
from client.errors import InvalidRequestError, RequestTimeoutError, UnsupportedRequestError
from engine.demo import CHECKPOINT_DIR
from engine.launch.server import TritonServer
from tests.server.resilience.service import MAX_MODEL_LEN

pytestmark = pytest.mark.server

PROMPTS = ["Hello", "Über 東京 🚀", "a b c d e f", "1 + 1 ="]


class Served(NamedTuple):
    """A model with its limit."""

    grpc_url: str
    model: str
    max_model_len: int


@pytest.fixture(scope="module", params=["batched", "vllm"])
def served(
    request: pytest.FixtureRequest, resilient: TritonServer, vllm_server: TritonServer
) -> Served:
    """Trident itself, with and without a batch dimension."""
    if request.param == "batched":
        return Served(resilient.grpc_url, resilient.model, MAX_MODEL_LEN)
    limit = json.loads((CHECKPOINT_DIR / "config.json").read_text())["max_position_embeddings"]
    return Served(vllm_server.grpc_url, vllm_server.model, limit)


def test_streamed_or_not_sync_or_async_the_answer_is_one(served: Served) -> None:
    async def side_by_side() -> list[Completion]:
        async with AsyncTridentClient(served.grpc_url, model=served.model) as client:
            return await asyncio.gather(
                *(client.generate(p, max_tokens=24, temperature=0) for p in PROMPTS)
            )

    with TridentClient(served.grpc_url, model=served.model) as client:
        alone = [client.generate(prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
    streamed = asyncio.run(side_by_side())
    for one, other in zip(alone, streamed, strict=True):
        assert one.outputs == other.outputs
        assert one.num_input_tokens == other.num_input_tokens > 0
        assert 0 < one.num_output_tokens <= 24
        assert one.finish_reason in ("stop", "length")


def test_messages_and_several_sequences(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with TridentClient(served.grpc_url, model=served.model) as client:
        completion = client.generate(messages=messages, n=3, seed=1, temperature=1.0, max_tokens=8)
    assert [output.index for output in completion.outputs] == [0, 1, 2]
    assert all(output.finish_reason for output in completion.outputs)
    assert completion.num_output_tokens <= 24


def test_which_stop_string_it_was(served: Served) -> None:
    with TridentClient(served.grpc_url, model=served.model) as client:
        whole = client.generate("Hello", max_tokens=24, temperature=0).text
        stopped = client.generate("Hello", max_tokens=24, temperature=0, stop=["\0", whole[8:10]])
        unmatched = client.generate("Hello", max_tokens=2, temperature=0, stop=["\0"])
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", whole[8:10])
    assert (unmatched.finish_reason, unmatched.outputs[0].stop_reason) == ("length", None)


def test_errors_name_the_field(served: Served) -> None:
    with TridentClient(served.grpc_url, model=served.model) as client:
        with pytest.raises(InvalidRequestError, match=r"^temperature: "):
            client.generate("a", temperature=-1.0)
        with pytest.raises(InvalidRequestError, match=r"^no_such_field: "):
            client.generate("a", no_such_field=1)  # type: ignore[misc]
        with pytest.raises(UnsupportedRequestError, match=r"^lora_name: "):
            client.generate("a", lora_name="b")  # type: ignore[misc]
        with pytest.raises(InvalidRequestError, match=str(served.max_model_len)):
            client.generate("x y " * 50_000)
        assert client.generate("a", max_tokens=1).num_output_tokens == 1


def test_timeouts_and_left_streams_leave_the_server_well(served: Served) -> None:
    with TridentClient(served.grpc_url, model=served.model) as client:
        for _ in range(3):
            with pytest.raises(RequestTimeoutError):
                client.generate("a", max_tokens=None, ignore_eos=True, timeout=0.3)
            for _chunk in client.stream("a", max_tokens=None, ignore_eos=True):
                break
        assert client.generate("a", max_tokens=3, ignore_eos=True).num_output_tokens == 3
