"""The clients on the real ensemble with a tiny random checkpoint."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import AsyncTridentClient, Completion, TridentClient
from client.errors import InvalidRequestError, RequestTimeoutError, UnsupportedRequestError
from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

pytestmark = pytest.mark.server

PROMPTS = ["Hello", "Über 東京 🚀", "a b c d e f", "1 + 1 ="]
MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    write_checkpoint(
        folder, vocab_size=max(512, len(tokenizer)), max_position_embeddings=MAX_MODEL_LEN
    )
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module", params=["batched", "vllm"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[TritonServer]:
    """Trident itself, with and without a batch dimension."""
    arguments = [] if request.param == "batched" else ["--model-config-name=vllm"]
    settings = {"model": str(checkpoint), "num_gpu_blocks_override": 1200}
    with TritonServer(settings, ports=0, arguments=arguments) as running:
        yield running


def test_streamed_or_not_sync_or_async_the_answer_is_one(server: TritonServer) -> None:
    async def side_by_side() -> list[Completion]:
        async with AsyncTridentClient(server.grpc_url) as client:
            return await asyncio.gather(
                *(client.generate(p, max_tokens=24, temperature=0) for p in PROMPTS)
            )

    with TridentClient(server.grpc_url) as client:
        alone = [client.generate(prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
    streamed = asyncio.run(side_by_side())
    for one, other in zip(alone, streamed, strict=True):
        assert one.outputs == other.outputs
        assert one.num_input_tokens == other.num_input_tokens > 0
        assert 0 < one.num_output_tokens <= 24
        assert one.finish_reason in ("stop", "length")


def test_messages_and_several_sequences(server: TritonServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with TridentClient(server.grpc_url) as client:
        completion = client.generate(messages=messages, n=3, seed=1, temperature=1.0, max_tokens=8)
    assert [output.index for output in completion.outputs] == [0, 1, 2]
    assert all(output.finish_reason for output in completion.outputs)
    assert completion.num_output_tokens <= 24


def test_which_stop_string_it_was(server: TritonServer) -> None:
    with TridentClient(server.grpc_url) as client:
        whole = client.generate("Hello", max_tokens=24, temperature=0).text
        stopped = client.generate("Hello", max_tokens=24, temperature=0, stop=["\0", whole[8:10]])
        unmatched = client.generate("Hello", max_tokens=2, temperature=0, stop=["\0"])
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", whole[8:10])
    assert (unmatched.finish_reason, unmatched.outputs[0].stop_reason) == ("length", None)


def test_errors_name_the_field(server: TritonServer) -> None:
    with TridentClient(server.grpc_url) as client:
        with pytest.raises(InvalidRequestError, match=r"^temperature: "):
            client.generate("a", temperature=-1.0)
        with pytest.raises(InvalidRequestError, match=r"^no_such_field: "):
            client.generate("a", no_such_field=1)  # type: ignore[misc]
        with pytest.raises(UnsupportedRequestError, match=r"^lora_name: "):
            client.generate("a", lora_name="b")  # type: ignore[misc]
        with pytest.raises(InvalidRequestError, match=str(MAX_MODEL_LEN)):
            client.generate("x y " * 50_000)
        assert client.generate("a", max_tokens=1).num_output_tokens == 1


def test_timeouts_and_left_streams_leave_the_server_well(server: TritonServer) -> None:
    with TridentClient(server.grpc_url) as client:
        for _ in range(3):
            with pytest.raises(RequestTimeoutError):
                client.generate("a", max_tokens=None, ignore_eos=True, timeout=0.3)
            for _chunk in client.stream("a", max_tokens=None, ignore_eos=True):
                break
        assert client.generate("a", max_tokens=3, ignore_eos=True).num_output_tokens == 3
