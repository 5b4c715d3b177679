"""GatewayClient: requests to a gateway, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from http.client import BadStatusLine, HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Self, Unpack

from client.client_protocol import CommonRequestOptions
from client.connection import SSLOptions
from client.errors import (
    ConfigurationError,
    RequestTimeoutError,
    ServerError,
    TridentClientError,
    UnavailableError,
    from_openai,
)
from client.http_connection import HTTPAddress
from client.protocol import Chunk, Health, Prompt, Section
from client.retry import DEFAULT_RETRY, RetryPolicy

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class GatewayClient:
    """A `ClientProtocol` over HTTP; each request has a connection of its own.

    Args:
        url: `http://host:port` or `https://host:port` of the gateway.
        model: the name to call the model by; None: there is one.
        api_key: that the gateway asks for, or empty.
        ssl: your own certificates, for https.
        headers: sent with each request.
        retry: how a request is tried again when the server is away or full; None: never.

    Raises:
        ConfigurationError: the address is none, or a certificate or a header cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str = "",
        ssl: bool | SSLOptions = False,
        headers: Mapping[str, str] = {},
        retry: RetryPolicy | None = DEFAULT_RETRY,
    ) -> None:
        self._address = HTTPAddress(url, ssl)
        self._model = {} if model is None else {"model": model}
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"content-type": "application/json", **key, **headers}
        for name, value in self._headers.items():
            if not (name + value).isascii() or not (name + value).isprintable():
                raise ConfigurationError("is not printable ASCII", param=name)  # it may be a key
        self._retry = retry

    def stream(
        self, prompt: Prompt | None = None, **options: Unpack[CommonRequestOptions]
    ) -> Generator[Chunk, None, None]:
        """Yield the answer piece by piece; as `TridentClient.stream`.

        In the answers to messages, `sections` name what is reasoning.
        """
        deadline = _Deadline(options.pop("timeout", None))
        options.pop("return_sections", None)
        body = {**self._model, **options, "stream": True, "stream_options": _USAGE}
        path = "/v1/chat/completions"
        if options.get("messages") is None:
            body["prompt"], path = prompt, "/v1/completions"
        delays = iter(()) if self._retry is None else self._retry.delays()
        while True:
            has_begun = False
            try:
                with closing(self._events(path, body, deadline)) as events:
                    for chunk in _chunks(events):
                        has_begun = True
                        yield chunk
                return
            except (LookupError, TypeError, AttributeError):  # an event without what belongs to it
                raise self._no_gateway() from None
            except UnavailableError:
                delay = next(delays, None)
                if has_begun or delay is None or delay > (deadline.left() or delay):
                    raise
            time.sleep(delay)

    def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of the servers behind the gateway.

        Raises:
            UnavailableError: none takes requests, or nobody answers; the text has the reason.
            TridentClientError: the gateway could not be asked.
        """
        with closing(self._ask("GET", "/health/ready", None, _Deadline(timeout))) as answer:
            found = self._read(b"".join(answer))
        if not isinstance(num_in_flight := found.get("num_in_flight"), int):
            raise self._no_gateway()
        return Health("ready", num_in_flight=num_in_flight)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def _events(self, path: str, body: Any, deadline: _Deadline) -> Generator[Any, None, None]:
        """Yield the data of a stream's events, up to its end."""
        with closing(self._ask("POST", path, json.dumps(body).encode(), deadline)) as lines:
            for line in lines:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    return
                event = self._read(line.removeprefix(b"data: "))
                if "error" in event:
                    raise from_openai(event["error"])
                yield event
        raise UnavailableError("the server ended the answer before it was complete; try again")

    def _ask(
        self, method: str, path: str, body: bytes | None, deadline: _Deadline
    ) -> Generator[bytes, None, None]:
        """Yield the lines of the answer to one request.

        Raises:
            TridentClientError: there is none, or it is an error.
        """
        with closing(self._address.connection()) as connection:
            self._address.connect(connection)
            socket = connection.sock  # it may be the answer's alone later
            try:
                socket.settimeout(deadline.left())
                connection.request(method, self._address.path + path, body, self._headers)
                with closing(connection.getresponse()) as answer:
                    if answer.status != 200:
                        raise self._error(answer)
                    while line := answer.readline():
                        yield line
                        socket.settimeout(deadline.left())
            except TimeoutError:
                raise _timed_out() from None
            except (OSError, HTTPException) as error:
                # Not what it said, which may be binary; an empty answer is an `OSError` too.
                if isinstance(error, BadStatusLine) and not isinstance(error, OSError):
                    raise ServerError(
                        f"{self._address.name} does not answer in HTTP: for the gRPC port give "
                        "host:port, without http://"
                    ) from None
                what = str(error) or type(error).__name__
                raise UnavailableError(
                    f"the connection with {self._address.name} broke: {what}"
                ) from None

    def _read(self, content: bytes) -> dict[str, Any]:
        """Return the object that a part of an answer is."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            found = None
        if not isinstance(found, dict):
            raise self._no_gateway()
        return found

    def _no_gateway(self) -> ServerError:
        return ServerError(f"{self._address.name}: the answer cannot be read: it may be no gateway")

    def _error(self, answer: HTTPResponse) -> TridentClientError:
        try:
            return from_openai(json.loads(answer.read())["error"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ServerError(
                f"{self._address.name} answers with HTTP status {answer.status}: "
                "that may be no gateway"
            )


class _Deadline:
    """When a request is given up."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds until then; None without a limit.

        Raises:
            RequestTimeoutError: there are none.
        """
        if self._at is None:
            return None
        if (left := self._at - time.monotonic()) <= 0:
            raise _timed_out()
        return left


def _timed_out() -> RequestTimeoutError:
    return RequestTimeoutError("the request took longer than its timeout")


def _chunks(events: Iterator[Any]) -> Iterator[Chunk]:
    num_tokens = 0
    for event in events:
        usage = event["usage"]
        added, num_tokens = usage["completion_tokens"] - num_tokens, usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            parts = ((0, "reasoning", "reasoning_content"), (1, "content", "content"))
            sections = tuple(
                Section(kind, index, delta[name]) for index, kind, name in parts if delta.get(name)
            )
            yield Chunk(
                choice["text"] if "text" in choice else "".join(each.text for each in sections),
                choice["index"],
                choice["finish_reason"],
                added,
                usage["prompt_tokens"],
                sections=None if "text" in choice else sections,
            )
            added = 0
