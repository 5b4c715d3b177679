"""Servers that run already, anywhere, by their URL."""

from __future__ import annotations

import os
import time
from typing import Self
from urllib.parse import urlsplit

from client.bench.errors import BenchError
from client.bench.load.record import Form, Target
from client.bench.servers.server import Server, first_model
from client.request import ENSEMBLE


class External(Server):
    """A server at a URL: `http://host:port/v1` of OpenAI's API, or an ensemble.

    `http://host:port/v1/chat` is asked for chats. The ensemble is at `grpc://host:port`, or
    `http://host:port/v2`.

    Args:
        model: the server's name of its model; empty: the first that it lists.

    Raises:
        BenchError: the URL is none of these.
    """

    def __init__(self, name: str, url: str, *, model: str = "", metrics_url: str = "") -> None:
        self.name = name
        self.metrics_url = metrics_url
        parts = urlsplit(url.rstrip("/"))
        self._form: Form
        if parts.scheme == "grpc" and parts.port and not parts.path:
            self._form, self._url = "grpc", f"{parts.hostname}:{parts.port}"
        elif parts.scheme in ("http", "https") and parts.path == "/v2":
            self._form, self._url = "triton-http", f"{parts.scheme}://{parts.netloc}"
        elif parts.scheme in ("http", "https") and parts.hostname:
            self._url = url.rstrip("/").removesuffix("/chat")
            self._form = "chat" if self._url != url.rstrip("/") else "completions"
        else:
            raise BenchError(
                f"--url: must be http://HOST:PORT/v1, grpc://HOST:PORT or http://HOST:PORT/v2 "
                f"(got {url!r})"
            )
        is_openai = self._form in ("completions", "chat")
        self._model = model or ("" if is_openai else ENSEMBLE)
        self._key = os.environ.get("OPENAI_API_KEY", "") if is_openai else ""

    @property
    def target(self) -> Target:
        """As `Server.target`."""
        return Target(self._form, self._url, self._model, key=self._key)

    def wait_until_ready(self) -> None:
        """As `Server.wait_until_ready`: it must be."""
        try:
            self._model = self._model or first_model(self._url, self._key)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BenchError(
                f"{self._url}/models lists no model ({error}); --model-name gives it"
            ) from None

    def __enter__(self) -> Self:
        self.launched = time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave it as it is."""
