"""Session: settings and state that both clients share, and the requests they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from tritonclient.grpc import service_pb2

from client import request, response
from client.connection import Connection
from client.errors import ServerError, UnavailableError
from client.exchange import Exchange
from client.protocol import ChatParameters, Chunk, Health, Message, Prompt, Tokens
from client.request import Request
from client.retry import RetryPolicy
from client.timeouts import Timeout, limits

T = TypeVar("T")

WITHDRAWAL_TIMEOUT_S = 1.0
# The first try may still be given to the connection that has just been lost.
_WITHDRAWAL_RETRY = RetryPolicy(attempts=3, first_delay_s=0.05)
_NO_LIMITS = Timeout()


@dataclass
class Session:
    """What both clients share, without any I/O.

    Attributes:
        connection: with the server.
        timeout: of requests that name none.
        retry: None never tries again.
        model: the name under which the ensemble is served.
        batched: whether the server's models take a batch dimension; None as long as unknown.
    """

    connection: Connection
    timeout: Timeout
    retry: RetryPolicy | None
    model: str = request.ENSEMBLE
    batched: bool | None = None

    def completion(
        self,
        prompt: Prompt | None,
        *,
        messages: Sequence[Message] | None = None,
        chat_parameters: ChatParameters | None = None,
        timeout: float | Timeout | None = None,
        priority: int = 0,
        request_id: str = "",
        **sampling: Any,
    ) -> Exchange[Chunk]:
        """Return the exchange that completes a prompt or answers messages.

        Raises:
            InvalidRequestError: an argument cannot be sent.
        """
        total, read = limits(timeout, self.timeout)
        own_id = request_id or uuid4().hex
        asked = request.completion(
            prompt,
            messages,
            sampling,
            chat_parameters=chat_parameters,
            priority=priority,
            request_id=own_id,
            model=self.model,
        )
        return Exchange(
            asked,
            response.read_chunks,
            url=self.connection.url,
            total=total,
            read_timeout=read,
            retry=self.retry,
            withdrawal=request.stop(own_id, self.model),
        )

    def withdrawal(self, exchange: Exchange[Any]) -> Exchange[None] | None:
        """Return the exchange that ends the request of `exchange` on the server, if it may run.

        A connection that ends is noticed by the server only as it answers, not while the request
        waits to run.
        """
        if exchange.withdrawal is None or not exchange.may_be_running:
            return None
        return self._exchange(
            exchange.withdrawal, response.read_nothing, WITHDRAWAL_TIMEOUT_S, _WITHDRAWAL_RETRY
        )

    def stop(self, request_id: str, timeout: float | None) -> Exchange[None]:
        """Return the exchange that ends the requests of that id.

        Raises:
            InvalidRequestError: the id is empty or cannot be sent.
        """
        return self._exchange(
            request.stop(request_id, self.model), response.read_nothing, timeout, self.retry
        )

    def health(self, timeout: float | None) -> Exchange[Health]:
        """Return the exchange that asks for the state of the engine, without retries."""
        return self._exchange(request.health(), response.read_health, timeout, None)

    def tokenize(
        self,
        text: str | None,
        *,
        messages: Sequence[Message] | None = None,
        chat_parameters: ChatParameters | None = None,
        add_special_tokens: bool | None = None,
        tenant: str | None = None,
        tenant_key: str | None = None,
        timeout: float | None = None,
    ) -> Exchange[Tokens]:
        """Return the exchange that asks for the tokens of a text or of messages.

        Raises:
            InvalidRequestError: an argument cannot be sent.
        """
        asked = request.tokenize(
            text, messages, chat_parameters, add_special_tokens, tenant, tenant_key
        )
        return self._exchange(asked, response.read_tokens, timeout, self.retry)

    def detokenize(self, token_ids: Sequence[int], timeout: float | None) -> Exchange[str]:
        """Return the exchange that asks for the text of tokens.

        Raises:
            InvalidRequestError: they cannot be sent.
        """
        asked = request.detokenize(token_ids)
        return self._exchange(asked, response.read_text, timeout, self.retry)

    def config_request(self) -> service_pb2.ModelConfigRequest:
        """Return the request whose response `learn` takes."""
        return service_pb2.ModelConfigRequest(name=self.model)

    def learn(self, config: service_pb2.ModelConfigResponse) -> bool:
        """Remember and return whether the server's models take a batch dimension."""
        self.batched = response.takes_batches(config)
        return self.batched

    def ready_request(self) -> service_pb2.ModelReadyRequest:
        """Return the question for a server without a health input."""
        return service_pb2.ModelReadyRequest(name=self.model)

    def health_of(self, ready: service_pb2.ModelReadyResponse) -> Health:
        """Return what a server without a health input says.

        Raises:
            UnavailableError: it is not ready.
        """
        if not ready.ready:
            raise UnavailableError(f"the model {self.model} is not ready")
        return Health("ready")

    def _exchange(
        self,
        asked: Request,
        read: Callable[[service_pb2.ModelInferResponse], Iterable[T]],
        timeout: float | None,
        retry: RetryPolicy | None,
    ) -> Exchange[T]:
        total, _ = limits(timeout, _NO_LIMITS)
        return Exchange(
            asked, read, url=self.connection.url, total=total, read_timeout=math.inf, retry=retry
        )


def only(answers: Sequence[T]) -> T:
    """Return the answer; raise `ServerError` if there is none."""
    if not answers:
        raise ServerError("the server ended the request without an answer")
    return answers[-1]
