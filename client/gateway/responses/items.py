"""Items of a response's input, as they are kept and listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct
from msgspec.json import Decoder
from pydantic import TypeAdapter

from client.gateway.errors import ApiError
from client.gateway.responses.protocol import (
    InputItem,
    InputItemsQuery,
    Item,
    ItemReference,
    MessageItem,
    ResponseRequest,
)
from client.gateway.responses.resource import ItemList

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_RAW_ITEMS = Decoder(list[Raw])
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class _Identified(Struct):
    """An item, of which the id alone is read."""

    id: str


_IDENTIFIED = Decoder(_Identified)


def items_of(body: ResponseRequest) -> list[Item | ItemReference]:
    """Return the items of a request's input: a text is a message of the user's."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return body.input


def items_in(content: list[dict[str, Any]]) -> list[Item]:
    """Return items that were listed."""
    return _ITEMS.validate_python(content)


def listed(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return `items` as answers have them: each with an id, a status and parts of content."""
    return [_listed(item) for item in items]


def raw_items(content: bytes) -> list[Raw]:
    """Return the items of a list that is kept, each as JSON."""
    return _RAW_ITEMS.decode(content)


def id_of(item: Raw) -> str:
    """Return the id of an item that is kept."""
    return _IDENTIFIED.decode(item).id


def page(content: bytes, query: InputItemsQuery) -> ItemList:
    """Return the part of a list that is asked for.

    Args:
        content: the items as they are kept.
        query: which of them.

    Raises:
        ApiError: `after` is none of the items.
    """
    items = raw_items(content)
    ordered = items if query.order == "asc" else items[::-1]
    begin = 0
    if query.after is not None:
        ids = [id_of(item) for item in ordered]
        if query.after not in ids:
            raise ApiError(f"there is no item {query.after!r}", param="after")
        begin = ids.index(query.after) + 1
    found = [msgspec.json.decode(item) for item in ordered[begin : begin + query.limit]]
    return ItemList(
        found,
        first_id=found[0]["id"] if found else None,
        last_id=found[-1]["id"] if found else None,
        has_more=begin + len(found) < len(ordered),
    )


def _listed(item: Item) -> dict[str, Any]:
    made: dict[str, Any] = {"id": new_id(_PREFIXES[item.type]), "status": "completed"}
    made |= item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        is_answer = item.role == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
        part |= {"text": item.content} | ({"annotations": [], "logprobs": []} if is_answer else {})
        made["content"] = [part]
    return made


def new_id(prefix: str) -> str:
    """Return an id that nobody else has."""
    return f"{prefix}_{uuid4().hex}"
