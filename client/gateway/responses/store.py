"""ResponseStore: responses that their clients may ask for again."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

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
        SELECT number, row_number() OVER newest AS place, sum(size) OVER newest AS total
        FROM responses WHERE owner = :owner WINDOW newest AS (ORDER BY number DESC)
    ) WHERE place > :max_responses OR total > :max_bytes
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
