"""TridentClient: prompts in, text out, over gRPC."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self, Unpack

from client.connection import CONNECT_TIMEOUT_S, SSLOptions, connection
from client.errors import InvalidRequestError, TridentClientError
from client.protocol import (
    Chunk,
    Completion,
    Health,
    Prompt,
    RequestOptions,
    TokenizeOptions,
    Tokens,
)
from client.request import ENSEMBLE
from client.response import Collector
from client.retry import DEFAULT_RETRY, RetryPolicy
from client.session import Session, only
from client.timeouts import Timeout
from client.transport import Transport


class TridentClient:
    """Talks to one server; safe to use from several threads at once. A context manager.

        with TridentClient("localhost:8001") as client:
            print(client.generate("Once upon a time", max_tokens=64).text)

    Nothing is connected before the first request; a client that is used after a fork has to be
    first used there, for gRPC does not survive a fork.

    Args:
        url: `host:port` of the server's gRPC service, or `grpc://host:port`; `grpcs://host:port`
            is TLS.
        model: the name under which the server serves it: its setting `served_model_name`.
        ssl: True for TLS with gRPC's certificates, `SSLOptions` for your own, False for none.
        headers: sent with each call, such as `authorization`.
        timeout: of requests that name none; see `generate`.
        connect_timeout: seconds that one attempt to connect may take.
        retry: how a request is tried again when the server is away or full; None: never.
        proxy: whether to take the proxy of the environment (`grpc_proxy`, `https_proxy`,
            `http_proxy`), which is never taken to a server on this machine.

    Raises:
        ConfigurationError: the address is none, a certificate cannot be read, a header cannot be
            sent, or a time is out of its range.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = ENSEMBLE,
        ssl: bool | SSLOptions = False,
        headers: Mapping[str, str] = {},
        timeout: float | Timeout | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        proxy: bool = True,
    ) -> None:
        to = connection(url, ssl, headers, connect_timeout, proxy=proxy)
        self._session = Session(to, Timeout.of(timeout), retry, model)
        self._transport = Transport(self._session)

    def generate(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Complete a prompt, or answer chat messages, and return the whole.

        Args:
            prompt: text or token ids to complete, without a chat template.
            messages: a chat as a list of `{"role": ..., "content": ...}`, instead of a prompt.
            chat_parameters: what the chat template gets beside the messages.
            timeout: seconds until the request is given up, further attempts included, or a
                `Timeout`; None is the client's.
            priority: smaller runs earlier, on a server with `scheduling_policy` priority.
            request_id: what the server calls it, and `cancel`. It must be unique: a request that
                is given up ends all requests of its id.
            **options: more in `SamplingOptions`.

        Raises:
            TridentClientError: see `client.errors`.
        """
        collector = Collector()
        stream = self.stream(prompt, **options)
        with closing(stream) as chunks:
            for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[Chunk, None, None]:
        """Yield the answer piece by piece; the arguments are those of `generate`.

        The request is sent when the first piece is asked for. Leaving the loop early, or closing
        the generator, cancels it on the server.
        """
        return self._transport.run(self._session.completion(prompt, **options))

    def cancel(self, request_id: str, timeout: float | None = 5.0) -> None:
        """End all requests of that id, those of other clients too; an unknown id is no error.

        Each is answered with its tokens so far, and the finish reason `abort`.
        """
        list(self._transport.run(self._session.stop(request_id, timeout)))

    def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> Tokens:
        """Return the tokens of a text or of messages, which may be too long for the model.

        Args:
            text: the prompt.
            messages: a chat instead.
            chat_parameters: what the chat template gets beside the messages.
            add_special_tokens: those that start a prompt; None: for a text, as in a request.
            tenant, tenant_key: on whose behalf; see `TridentClient.generate`.
            timeout: seconds, or None.

        Raises:
            InvalidRequestError: it is wrong, or much too long.
            TridentClientError: anything else.
        """
        return only(list(self._transport.run(self._session.tokenize(text, **options))))

    def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """Return the text of tokens, special ones included; errors as in `tokenize`."""
        return only(list(self._transport.run(self._session.detokenize(token_ids, timeout))))

    def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of the engine.

        Raises:
            UnavailableError: it takes no requests, or no server answers; the text has the reason.
            TridentClientError: the server could not be asked.
        """
        exchange = self._session.health(timeout)
        try:
            return only(list(self._transport.run(exchange)))
        except InvalidRequestError:  # a server without health requests
            ready = self._transport.ask("ModelReady", self._session.ready_request(), exchange)
            return self._session.health_of(ready)

    def is_ready(self, timeout: float | None = 5.0) -> bool:
        """Return whether the server answers and its engine takes requests."""
        try:
            return self.health(timeout).is_ready
        except TridentClientError:
            return False

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
