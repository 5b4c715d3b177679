"""What is kept of responses: the newest of each owner, and within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from client.gateway.responses.history import ResponseStore, StoredResponse


def stored(text: str, size: int = 2) -> StoredResponse:
    return StoredResponse(text.encode().ljust(size - 1), b"i")


async def ids(store: ResponseStore, owner: str) -> list[int]:
    return [i for i in range(20) if await store.get(owner, f"r{i}") is not None]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ResponseStore]:
    file = tmp_path / "responses" if request.param == "file" else None
    return lambda *limits: ResponseStore(*limits, file)


def test_the_oldest_go_first_and_only_their_owners(make: Callable[..., ResponseStore]) -> None:
    async def episode() -> None:
        with closing(make(3, 100)) as store:
            for i in range(5):
                assert await store.put("a", f"r{i}", stored(str(i)))
                assert await store.put("b", f"r{i}", stored("b"))
                assert await store.get("a", f"r{i}") == stored(str(i))
            assert await ids(store, "a") == await ids(store, "b") == [2, 3, 4]
            assert await store.put("a", "r5", stored("5", 98))  # beside one more
            assert await ids(store, "a") == [4, 5]
            assert not await store.put("a", "r6", stored("6", 101))
            assert await ids(store, "a") == [4, 5]
            assert await store.delete("a", "r4")
            assert not await store.delete("a", "r4")
            assert (await ids(store, "a"), await ids(store, "b")) == ([5], [2, 3, 4])
            assert await ids(store, "c") == []

    asyncio.run(episode())


def test_a_response_is_found_by_its_items_until_it_is_dropped(
    make: Callable[..., ResponseStore],
) -> None:
    async def episode() -> None:
        with closing(make(2, 100)) as store:
            for i in range(3):
                await store.put("a", f"r{i}", stored(str(i))._replace(item_ids=(f"m{i}", f"f{i}")))
            assert await store.get_by_item("a", "m0") is None
            assert await store.get_by_item("a", "f1") == stored("1")
            assert await store.get_by_item("b", "f1") is None
            await store.delete("a", "r1")
            assert await store.get_by_item("a", "f1") is None
            assert await store.get_by_item("a", "m2") == stored("2")

    asyncio.run(episode())


def test_several_write_one_file(tmp_path: Path) -> None:
    def write(owner: str) -> None:
        async def episode() -> None:
            with closing(ResponseStore(10, 10**6, tmp_path / "responses")) as store:
                for i in range(20):
                    assert await store.put(owner, f"r{i}", stored(owner, 5000))

        asyncio.run(episode())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, ["a", "b", "c", "d"]))
    with closing(ResponseStore(10, 10**6, tmp_path / "responses")) as store:
        for owner in "abcd":
            assert asyncio.run(ids(store, owner)) == list(range(10, 20))
