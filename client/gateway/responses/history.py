"""History: what a request for a response finds of earlier ones, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from client.gateway.errors import ApiError
from client.gateway.responses.items import items_in, listed
from client.gateway.responses.store import ResponseStore, StoredResponse
from client.gateway.schemas.response_items import Item, ItemReference
from client.gateway.schemas.response_resource import Response

_KEPT = "only those are kept that were asked for with store, and of these the newest"


class History:
    """The stored responses of one owner."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    async def before(self, response_id: str) -> list[Item]:
        """Return the items of a conversation up to a response, and those of its output.

        Raises:
            ApiError: it is not there.
        """
        stored = await self._store.get(self._owner, response_id)
        if stored is None:
            name = "previous_response_id"
            message = f"{name}: there is no response {response_id!r}; {_KEPT}"
            raise ApiError(400, message, param=name, code="previous_response_not_found")
        return await asyncio.to_thread(_whole, stored)

    async def resolved(self, items: Sequence[Item | ItemReference]) -> list[Item]:
        """Return the items of a request's input, with those that it refers to.

        Raises:
            ApiError: one is not there.
        """
        known: dict[str | None, Item] = {}
        made: list[Item] = []
        for index, item in enumerate(items):
            if not isinstance(item, ItemReference):
                made.append(item)
                continue
            if item.id not in known:
                stored = await self._store.get_by_item(self._owner, item.id)
                if stored is None:
                    name = f"input[{index}].id"
                    message = f"{name}: there is no item {item.id!r}; of responses {_KEPT}"
                    raise ApiError(400, message, param=name)
                whole = await asyncio.to_thread(_whole, stored)
                known |= {each.id: each for each in whole}
            made.append(known[item.id])
        return made

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


def _whole(stored: StoredResponse) -> list[Item]:
    return [*items_in(msgspec.json.decode(stored.input)), *_output(stored)]


def _output(stored: StoredResponse) -> list[Item]:
    return items_in(msgspec.json.decode(stored.response)["output"])
