"""Stores responses, and finds the earlier ones that a request refers to."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.json import Decoder

from client.gateway.errors import ApiError
from client.gateway.responses.items import id_of, items_in, listed, raw_items
from client.gateway.responses.protocol import Item, ItemReference
from client.gateway.responses.resource import Response
from client.gateway.schemas.limits import MAX_ITEMS
from client.gateway.security.body_limits import MAX_BODY_BYTES

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, id TEXT, size INTEGER,
    response BLOB, input BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS by_id ON responses (owner, id);
CREATE INDEX IF NOT EXISTS by_age ON responses (owner, number, size);
CREATE TABLE IF NOT EXISTS items (
    owner TEXT, id TEXT, number INTEGER REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (owner, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON items (number);
"""
_INSERT = "INSERT INTO responses (owner, id, size, response, input) VALUES (?, ?, ?, ?, ?)"
_INSERT_ITEM = "INSERT INTO items (owner, id, number) VALUES (?, ?, ?)"
_DROP_OLDEST = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, row_number() OVER newest AS rank, sum(size) OVER newest AS total
        FROM responses WHERE owner = :owner WINDOW newest AS (ORDER BY number DESC)
    ) WHERE rank > :max_responses OR total > :max_bytes
)
"""
_SELECT = "SELECT response, input FROM responses WHERE owner = ? AND id = ?"
_SELECT_SIZE = "SELECT size FROM responses WHERE owner = ? AND id = ?"
_SELECT_BY_ITEM = """
SELECT response, input FROM responses JOIN items USING (number, owner)
WHERE items.owner = ? AND items.id = ?
"""
_DELETE = "DELETE FROM responses WHERE owner = ? AND id = ?"
_BUSY_S = 30.0  # for which a process waits until another one has written


class StoredResponse(NamedTuple):
    """A response, and the list of all the items that it answers, as JSON.

    Attributes:
        item_ids: of the items of its output, and of its input as far as they are new; of what is
            got they are left out.
    """

    response: bytes
    input: bytes
    item_ids: tuple[str, ...] = ()


class ResponseStore:
    """The newest responses of each owner, within limits; nobody has another's.

    They are in memory, or in a file that several processes share. Threads may share it.

    Attributes:
        max_responses: of each owner; 0: nothing is kept.
    """

    def __init__(self, max_responses: int, max_bytes: int, file: Path | None = None) -> None:
        """Keep so many responses of each owner, of so many bytes together."""
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Nothing has to survive the machine's end.
        self._db = sqlite3.connect(
            file or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._db.executescript(f"PRAGMA synchronous=OFF; PRAGMA foreign_keys=ON; {_TABLES}")

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response, and drop the owner's oldest ones that it leaves no place for.

        Returns:
            Whether there is a place for it at all.
        """
        return await asyncio.to_thread(self._put, owner, response_id, stored)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, if it is there."""
        return await asyncio.to_thread(self._get, owner, response_id)

    async def size(self, owner: str, response_id: str) -> int | None:
        """Return how many bytes a response has, with what it answers, if it is there."""
        return await asyncio.to_thread(self._size, owner, response_id)

    async def get_by_item(self, owner: str, item_id: str) -> StoredResponse | None:
        """Return a response that has an item in its input or output."""
        return await asyncio.to_thread(self._get, owner, item_id, _SELECT_BY_ITEM)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Drop a response; return whether it was there."""
        return await asyncio.to_thread(self._delete, owner, response_id)

    def close(self) -> None:
        """Drop what is in memory."""
        with self._lock:
            self._db.close()

    def _put(self, owner: str, response_id: str, stored: StoredResponse) -> bool:
        contents = (stored.response, stored.input)
        size = sum(map(len, contents))
        if size > self._max_bytes or not self.max_responses:
            return False
        limits = {"max_responses": self.max_responses, "max_bytes": self._max_bytes}
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            number = self._db.execute(_INSERT, (owner, response_id, size, *contents)).lastrowid
            items = [(owner, item_id, number) for item_id in stored.item_ids]
            self._db.executemany(_INSERT_ITEM, items)
            self._db.execute(_DROP_OLDEST, {"owner": owner, **limits})
        return True

    def _get(self, owner: str, own_id: str, query: str = _SELECT) -> StoredResponse | None:
        with self._lock:
            found = self._db.execute(query, (owner, own_id)).fetchone()
        return None if found is None else StoredResponse(*found)

    def _size(self, owner: str, response_id: str) -> int | None:
        with self._lock:
            found = self._db.execute(_SELECT_SIZE, (owner, response_id)).fetchone()
        return None if found is None else int(found[0])

    def _delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            return self._db.execute(_DELETE, (owner, response_id)).rowcount > 0


_KEPT = "only those are kept that were asked for with store, and of these the newest"


class History:
    """The stored responses of one owner, as one request refers to them.

    What a request refers to may have as many bytes and items as it could send itself.
    """

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._num_bytes = 0  # of what was referred to
        self._num_items = 0  # of the conversation

    async def before(self, response_id: str) -> list[Item]:
        """Return the items of a conversation up to a response, and those of its output.

        Raises:
            ApiError: it is not there, or too long.
        """
        name = "previous_response_id"
        size = await self._store.size(self._owner, response_id)
        self._add_bytes(size or 0, name)
        stored = await self._store.get(self._owner, response_id)
        if stored is None:
            message = f"there is no response {response_id!r}; {_KEPT}"
            raise ApiError(message, param=name, code="previous_response_not_found")
        found = await asyncio.to_thread(_items_of, stored)
        self._add_items(len(found), name)
        return await asyncio.to_thread(_read, found)

    async def resolved(self, items: Sequence[Item | ItemReference]) -> list[Item]:
        """Return the items of a request's input, with those that it refers to.

        Raises:
            ApiError: one is not there, or is referred to twice, or they are too many.
        """
        self._add_items(len(items), "input")
        found = await self._referred(_reference_indices(items))
        return [found[each.id] if isinstance(each, ItemReference) else each for each in items]

    async def _referred(self, indices: dict[str, int]) -> dict[str, Item]:
        """Return items by their ids; `indices` are those of the references in the input."""
        found: dict[str, Item] = {}
        # From the last one on: its response often has those before it too.
        for item_id in reversed(indices):
            if item_id in found:
                continue
            name = f"input[{indices[item_id]}].id"
            stored = await self._store.get_by_item(self._owner, item_id)
            if stored is None:
                message = f"there is no item {item_id!r}; of responses {_KEPT}"
                raise ApiError(message, param=name)
            new = await asyncio.to_thread(_with_ids, stored, indices.keys() - found.keys())
            self._add_bytes(sum(map(len, new.values())), name)
            found |= zip(new, await asyncio.to_thread(_read, list(new.values())), strict=True)
        return found

    def _add_bytes(self, count: int, name: str) -> None:
        self._num_bytes += count
        if self._num_bytes > MAX_BODY_BYTES:
            raise ApiError(
                f"the items referred to have {self._num_bytes} bytes; at most {MAX_BODY_BYTES} are "
                "allowed in all, as in the body of a request",
                param=name,
            )

    def _add_items(self, count: int, name: str) -> None:
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise ApiError(
                f"the conversation has {self._num_items} items; at most {MAX_ITEMS} are allowed",
                param=name,
            )

    async def keep(self, response: Response, items: Sequence[Item]) -> bool:
        """Keep a response to `items`; return whether there is a place for it."""
        stored = await asyncio.to_thread(_stored, response, items)
        return await self._store.put(self._owner, response.id, stored)


def _stored(response: Response, items: Sequence[Item]) -> StoredResponse:
    asked = listed(items)
    # Not those that have an id: they are another response's, or the client's own.
    new = (told["id"] for told, item in zip(asked, items, strict=True) if item.id is None)
    ids = (*new, *(item.id for item in response.output))
    encode = msgspec.json.encode
    return StoredResponse(encode(response), encode(asked), ids)


class _Answered(Struct):
    """A response, of which the items alone are read, and they are not taken apart."""

    output: list[Raw]


_RESPONSE = Decoder(_Answered)


def _items_of(stored: StoredResponse) -> list[Raw]:
    """Return the items of a conversation as JSON."""
    return [*raw_items(stored.input), *_RESPONSE.decode(stored.response).output]


def _with_ids(stored: StoredResponse, wanted: Container[str]) -> dict[str, bytes]:
    """Return those items of a conversation that are wanted, as JSON, by their ids."""
    found = ((id_of(item), item) for item in _items_of(stored))
    return {item_id: bytes(item) for item_id, item in found if item_id in wanted}


def _read(items: Sequence[Raw | bytes]) -> list[Item]:
    return items_in([msgspec.json.decode(item) for item in items])


def _reference_indices(items: Sequence[Item | ItemReference]) -> dict[str, int]:
    """Return the indices of references by their ids.

    Raises:
        ApiError: two have the same.
    """
    indices: dict[str, int] = {}
    for index, item in enumerate(items):
        if (
            isinstance(item, ItemReference)
            and (first := indices.setdefault(item.id, index)) < index
        ):
            name = f"input[{index}].id"
            message = f"must be of another item than input[{first}].id (got {item.id!r})"
            raise ApiError(f"{message}; refer to an item once", param=name)
    return indices
