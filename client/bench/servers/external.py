"""Servers that run already, anywhere, by their URL."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import msgspec

from client.bench.errors import BenchError
from client.bench.load.record import Target
from client.bench.servers.server import Running, Server, first_model
from client.request import ENSEMBLE


def external(name: str, url: str, *, model: str = "", metrics_url: str = "") -> Server:
    """Return the server at a URL: `http://host:port/v1` of OpenAI's API, or an ensemble.

    `http://host:port/v1/chat` is asked for chats. The ensemble is at `grpc://host:port`, or
    `http://host:port/v2`.

    Args:
        model: the server's name of its model; empty: the first that it lists.

    Raises:
        BenchError: the URL is none of these.
    """
    whole = url.rstrip("/")
    parts = urlsplit(whole)
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    if parts.scheme == "grpc" and parts.port and not parts.path:
        target = Target("grpc", f"{parts.hostname}:{parts.port}", model or ENSEMBLE)
    elif is_http and parts.path == "/v2":
        target = Target("triton-http", whole.removesuffix("/v2"), model or ENSEMBLE)
    elif is_http:
        base, key = whole.removesuffix("/chat"), os.environ.get("OPENAI_API_KEY", "")
        target = Target("completions" if base == whole else "chat", base, model, key=key)
    else:
        raise BenchError(
            f"--url: must be http://HOST:PORT/v1, grpc://HOST:PORT or http://HOST:PORT/v2 "
            f"(got {url!r})"
        )
    return Server(name, partial(_running, target, metrics_url))


@contextmanager
def _running(target: Target, metrics_url: str) -> Iterator[Running]:
    launched = time.monotonic()
    try:
        model = target.model or first_model(target.url, target.key)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(
            f"{target.url}/models lists no model ({error}); give its name with --model-name"
        ) from None
    named = msgspec.structs.replace(target, model=model)
    yield Running(named, launched, metrics_url=metrics_url)
