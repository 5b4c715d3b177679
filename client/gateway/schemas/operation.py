"""Health, version and models: the bodies of responses."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from msgspec import Struct


class Health(Struct):
    """The gateway itself is up."""

    status: Literal["ok"] = "ok"


class Readiness(Struct):
    """Requests are taken."""

    num_in_flight: int
    status: Literal["ready"] = "ready"


class Version(Struct):
    """Trident's."""

    version: str


class ModelCard(Struct):
    """A name that the model can be called by; `root` is its own.

    The fields are OpenAI's, and those of Anthropic's `ModelInfo` that have a value here.
    """

    id: str
    created: int
    root: str
    display_name: str
    created_at: datetime
    object: Literal["model"] = "model"
    owned_by: Literal["trident"] = "trident"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(Struct):
    """All names; the first and last of them are sent to Anthropic's clients."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
