"""Plain requests to a gateway."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

MARK = "a prompt that nobody else may see"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def ask(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    **headers: str,
) -> Reply:
    """Return the answer to one request; `_` in the names of headers stands for `-`."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    content = None
    if body is not None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields.setdefault("content-type", "application/json")
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request(method, path, content, fields)
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, names, answer.read())


def complete(address: str, key: str = "", **fields: Any) -> Reply:
    """Ask for a completion."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return ask(address, "POST", "/v1/completions", {"prompt": MARK, **fields}, **headers)
