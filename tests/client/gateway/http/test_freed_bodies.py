"""What a failed request held is freed at once, without a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import Request

from client.gateway.app import create_app
from client.gateway.errors import ApiError
from client.gateway.generation import Generation, merged
from client.gateway.http.disconnect import until_disconnected
from client.gateway.settings import GatewaySettings


class Body:
    """A large body, that a weak reference can watch."""


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def never() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


def is_freed(work: Coroutine[Any, Any, None], body: weakref.ref[Body]) -> bool:
    async def run() -> bool:
        with suppress(ApiError):
            await work
        await asyncio.sleep(0)
        return body() is None

    return asyncio.run(run())


def test_until_disconnected_error_frees_the_body() -> None:
    body = Body()
    watched = weakref.ref(body)

    async def work(held: Body) -> None:
        raise ApiError("no")

    answer = until_disconnected(never, work(body))
    del body
    assert is_freed(answer, watched)


@pytest.mark.parametrize("count", [1, 3])
def test_merged_error_frees_the_body(count: int) -> None:
    body = Body()
    watched = weakref.ref(body)

    class Client:
        def __init__(self, held: Body) -> None:
            self.held = held

        def stream(self, *args: Any, **options: Any) -> Any:
            raise ApiError("no")

    async def work(client: Any) -> None:
        generations = [Generation(str(number), {}) for number in range(count)]
        async for _ in merged(client, generations):
            pass

    answer = work(Client(body))
    del body
    assert is_freed(answer, watched)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "stop": ["x" * 2**17]},  # validated in a thread of its own
        {"prompt": "a", "n": "x"},
        {"prompt": ["a", "b"]},  # for which there is no server
    ],
    ids=["large", "small", "sent"],
)
def test_refused_request_frees_the_body(body: dict[str, Any]) -> None:
    app = create_app(GatewaySettings(("localhost:1",)))
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return asked.pop() if asked else await never()

    async def send(message: Any) -> None:
        return None

    def requests() -> set[int]:
        # By its type: isinstance reads __class__, and some modules of torch warn of that.
        return {id(each) for each in gc.get_objects() if issubclass(type(each), Request)}

    async def answer() -> None:
        before = requests()
        await app(scope, receive, send)
        deadline = time.monotonic() + 60
        while not requests() <= before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # a thread that has read the body forgets it soon
        assert requests() <= before

    asyncio.run(answer())
