"""Gateways in front of the servers that tests share, and OpenAI's own clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from engine.text.tokenizer import Tokenizer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tagged import tagged_tokenizer
from tests.factories.tokenizers import save_tokenizer
from tests.server.conftest import Share
from tests.server.gateway.running import running
from tests.server.gateway.tools import CALL, TAGS, TEMPLATE, written

MODEL = "random/model"


@pytest.fixture(scope="session")
def gateway(server: TritonServer) -> Iterator[str]:
    """`host:port`."""
    settings = GatewaySettings(
        triton_urls=(server.grpc_url,),
        model_names=(MODEL, "alias"),
        metrics_urls=(server.metrics_url,),
    )
    with running(settings) as address:
        yield address


@pytest.fixture(scope="session")
def openai(gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


class Blocking:
    """An AsyncOpenAI, called like an OpenAI."""

    def __init__(self, base_url: str) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    def create(self, route: str, **arguments: Any) -> Any:
        async def call() -> Any:
            made = self._client
            for name in route.split("."):
                made = getattr(made, name)
            answer = await made.create(**arguments)  # type: ignore[attr-defined]
            return [each async for each in answer] if arguments.get("stream") else answer

        return self._runner.run(call())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class Direct:
    """An OpenAI, with the same interface."""

    def __init__(self, base_url: str) -> None:
        self._client = OpenAI(base_url=base_url, api_key="none", max_retries=0)

    def create(self, route: str, **arguments: Any) -> Any:
        made: Any = self._client
        for name in route.split("."):
            made = getattr(made, name)
        answer = made.create(**arguments)
        return list(answer) if arguments.get("stream") else answer

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session", params=[Direct, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, gateway: str) -> Iterator[Direct | Blocking]:
    """Either of OpenAI's clients; a stream comes as a list."""
    made = request.param(f"http://{gateway}/v1")
    yield made
    made.close()


@pytest.fixture(scope="session")
def tool_tokenizer() -> Any:
    """Of a model that reasons and calls tools."""
    made = tagged_tokenizer(TAGS, "special")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def tool_server(
    share: Share,
    request: pytest.FixtureRequest,
    tool_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> TritonServer:
    """One with that model."""
    folder: Path = tmp_path_factory.mktemp("tools")
    eos = tool_tokenizer.eos_token_id
    write_checkpoint(
        folder, vocab_size=len(tool_tokenizer), max_position_embeddings=1024, eos_token_id=eos
    )
    settings = {
        "model": str(save_tokenizer(tool_tokenizer, folder)),
        "dtype": "float32",
        "num_gpu_blocks_override": 300,
    }
    return share(request, TritonServer(settings, ports=0, start_timeout_s=120))


@pytest.fixture(scope="module")
def tool_gateway(tool_server: TritonServer) -> Iterator[str]:
    """`host:port` of a gateway in front of it."""
    with running(GatewaySettings(triton_urls=(tool_server.grpc_url,))) as address:
        yield address


@pytest.fixture(scope="session")
def blanks(tool_tokenizer: Any) -> dict[str, int]:
    """No blanks between the parts of JSON, of which a random model writes many."""
    texts = Tokenizer(tool_tokenizer)
    return {
        str(i): -100 for i in texts.text_token_ids() if not texts.token_text(i).strip(" \t\r\n")
    }


@pytest.fixture(scope="module")
def tool_openai(tool_gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{tool_gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def saying(tool_tokenizer: Any) -> dict[str, Any]:
    """Fields of a request by which that model thinks, speaks and calls."""
    begin = str(tool_tokenizer.convert_tokens_to_ids("<think>"))
    said = f"\nhm\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>"
    return {
        "structured_outputs": {**written(said), "begin_after": "<think>"},
        "logit_bias": {begin: 100},
    }
