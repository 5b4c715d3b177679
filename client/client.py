"""TridentClient: prompts in, text out, over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import protocol
from client.protocol import Chunk, Completion, Message, SamplingOptions


class TridentClient:
    """Talks to one server; safe to use from several threads at once. A context manager.

        with TridentClient("localhost:8001") as client:
            print(client.generate("Once upon a time", max_tokens=64).text)

    Args:
        url: `host:port` of the server's gRPC service. Nothing is sent before the first request.
    """

    def __init__(self, url: str = "localhost:8001") -> None:
        self._url = url
        self._channel = grpc.insecure_channel(url, options=protocol.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._batched: bool | None = None  # as the server's configuration says, once asked
        self._lock = threading.Lock()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Complete a prompt, or answer chat messages, and return the whole.

        Args:
            prompt: text to go on from, as it stands.
            messages: a chat as a list of `{"role": ..., "content": ...}`, instead of a prompt.
            stream: receive it piece by piece, which measures the time to the first token.
            timeout: seconds until the request is given up and cancelled; None waits.
            **sampling: see `SamplingOptions`.

        Raises:
            TridentClientError: see `client.errors`.
        """
        protocol.check_prompt(prompt, messages)
        collector = protocol.Collector(streamed=stream)
        with closing(self._chunks(prompt, messages, sampling, stream, timeout)) as chunks:
            for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Chunk, None, None]:
        """Yield the answer piece by piece; the arguments are those of `generate`.

        The request is sent when the first piece is asked for. Leaving the loop early, or closing
        the generator, cancels it on the server.
        """
        protocol.check_prompt(prompt, messages)
        return self._chunks(prompt, messages, sampling, True, timeout)

    def is_ready(self, timeout: float = 5.0) -> bool:
        """Tell whether the server answers and its model takes requests."""
        request = service_pb2.ModelReadyRequest(name=protocol.MODEL)
        try:
            return bool(self._stub.ModelReady(request, timeout=timeout).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _chunks(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        sampling: SamplingOptions,
        stream: bool,
        timeout: float | None,
    ) -> Generator[Chunk, None, None]:
        call = None
        complete = threading.Event()
        deadline = protocol.deadline(timeout)
        try:
            request = protocol.build_request(
                prompt, messages, sampling, stream=stream, batched=self._takes_batches(timeout)
            )
            # One stream per request: an error on a shared one would not say whose it is.
            call = self._stub.ModelStreamInfer(_held_open(request, complete), timeout=timeout)
            for response in call:
                if protocol.is_final(response):
                    complete.set()
                yield from protocol.read_chunks(response)
            if not complete.is_set():
                raise protocol.unfinished()
        except grpc.RpcError as error:
            raise protocol.rpc_error(error, self._url, deadline) from None
        finally:
            if call is not None:
                _end(call, complete)

    def _takes_batches(self, timeout: float | None) -> bool:
        with self._lock:
            if self._batched is None:
                request = service_pb2.ModelConfigRequest(name=protocol.MODEL)
                response = self._stub.ModelConfig(request, timeout=timeout)
                self._batched = protocol.takes_batches(response)
            return self._batched


def _held_open(
    request: service_pb2.ModelInferRequest, complete: threading.Event
) -> Iterator[service_pb2.ModelInferRequest]:
    """Yield the request, and say that there are no more only when it has been answered.

    tritonserver 24.10 overlooks some cancellations of a stream whose client has said so before.
    """
    yield request
    complete.wait()


def _end(call: grpc.Call, complete: threading.Event) -> None:
    """Cancel what is not complete; let the server end what is, for a late cancel disturbs it."""
    if complete.is_set():
        with suppress(grpc.RpcError):
            for _ in call:
                pass
    else:
        call.cancel()
        complete.set()  # releases the thread that sends the requests
