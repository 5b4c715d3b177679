"""History: what a request for a response finds of earlier ones, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence

import msgspec
from msgspec import Raw, Struct
from msgspec.json import Decoder

from client.gateway.errors import ApiError
from client.gateway.responses.items import id_of, items_in, listed, raw_items
from client.gateway.responses.store import ResponseStore, StoredResponse
from client.gateway.schemas.limits import MAX_ITEMS
from client.gateway.schemas.response_items import Item, ItemReference
from client.gateway.schemas.response_resource import Response
from client.gateway.security.body_limits import MAX_BODY_BYTES

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
        found = await self._referred(_places(items))
        return [found[each.id] if isinstance(each, ItemReference) else each for each in items]

    async def _referred(self, places: dict[str, int]) -> dict[str, Item]:
        """Return items by their ids; `places` are those of the references in the input."""
        found: dict[str, Item] = {}
        # From the last one on: its response often has those before it too.
        for item_id in reversed(places):
            if item_id in found:
                continue
            name = f"input[{places[item_id]}].id"
            stored = await self._store.get_by_item(self._owner, item_id)
            if stored is None:
                message = f"there is no item {item_id!r}; of responses {_KEPT}"
                raise ApiError(message, param=name)
            new = await asyncio.to_thread(_with_ids, stored, places.keys() - found.keys())
            self._add_bytes(sum(map(len, new.values())), name)
            found |= zip(new, await asyncio.to_thread(_read, list(new.values())), strict=True)
        return found

    def _add_bytes(self, count: int, name: str) -> None:
        self._num_bytes += count
        if self._num_bytes > MAX_BODY_BYTES:
            raise ApiError(
                f"what is referred to has {self._num_bytes} bytes; at most "
                f"{MAX_BODY_BYTES} are allowed in all, as in the body of a request",
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


def _places(items: Sequence[Item | ItemReference]) -> dict[str, int]:
    """Return the places of references by their ids.

    Raises:
        ApiError: two have the same.
    """
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        if isinstance(item, ItemReference) and (first := places.setdefault(item.id, place)) < place:
            name = f"input[{place}].id"
            message = f"must be of another item than input[{first}].id (got {item.id!r})"
            raise ApiError(f"{message}; refer to an item once", param=name)
    return places
