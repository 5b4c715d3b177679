"""The socket between the stage that answers plain `infer()` and the engine stub.

The stage cannot ask the model `engine` through Triton: a request from model to model (BLS) of
release 24.10 cannot be cancelled, loses the status code of an error, and keeps a thread of
tritonserver waiting for its first response. The engine stub listens in the abstract namespace, so
no file is left behind. Both ends take only a process of the same user whose parent is the same
tritonserver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ErrorReport
from engine.protocol.channel import Channel
from engine.protocol.messages import Chunk
from engine.service.link import is_sibling
from engine.service.tensors import Tensors

_BACKLOG = 8  # there is one stage, and while it is reloaded two
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_START_TIME = 19  # field of /proc/PID/stat behind the name, in ticks since the machine's start


# ---- stage -> engine stub -------------------------------------------------------------------


class UnaryRequest(msgspec.Struct, frozen=True, tag="request"):
    """A tokenised request: the inputs that the tokenizer stage gives the engine, as bytes.

    Answered by one `UnaryAnswer` or `UnaryFailed` of the same number.
    """

    number: int
    request_id: str
    input_ids: bytes  # int32
    sampling_parameters: bytes  # JSON
    priority: int
    timeout_us: int
    response_options: bytes

    @classmethod
    def of(cls, number: int, request_id: str, tensors: Tensors) -> UnaryRequest:
        """Return the message of `engine.service.stages.tokenized_request.engine_tensors`."""
        return cls(
            number,
            request_id,
            tensors["input_ids"].astype("<i4").tobytes(),
            tensors["sampling_parameters"].item(),
            int(tensors["priority"].item()),
            int(tensors["timeout"].item()),
            tensors["response_options"].tobytes(),
        )

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return them as the engine stub reads them."""
        return {
            "input_ids": np.frombuffer(self.input_ids, dtype="<i4"),
            "sampling_parameters": np.array([self.sampling_parameters], dtype=object),
            "priority": np.array([self.priority]),
            "timeout": np.array([self.timeout_us], dtype=np.uint64),
            "response_options": np.frombuffer(self.response_options, dtype=np.uint8),
        }


class UnaryCancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client of a request has gone. Unknown and finished numbers are ignored."""

    number: int


class UnaryStop(msgspec.Struct, frozen=True, tag="stop"):
    """End the requests of this id early; answered as a `UnaryRequest`."""

    number: int
    request_id: str


# ---- engine stub -> stage -------------------------------------------------------------------


class UnaryAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The whole answer to a request: one chunk for each sequence."""

    number: int
    chunks: list[Chunk]
    block_size: int  # tokens of a KV block


class UnaryFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request ended with an error."""

    number: int
    error: ErrorReport


ToEngineStub = UnaryRequest | UnaryCancel | UnaryStop
FromEngineStub = UnaryAnswer | UnaryFailed


def connect() -> Channel[ToEngineStub, FromEngineStub]:
    """Return a channel to the engine stub of this server.

    Raises:
        OSError: there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address())
        if not _is_of_this_server(connection):
            raise ConnectionRefusedError("another program listens in place of the engine stub")
    except OSError:
        connection.close()
        raise
    return Channel(connection, FromEngineStub)


def listener() -> socket.socket:
    """Return a listening socket for stages of this server.

    Raises:
        OSError: an engine stub of this server listens already: it is being replaced by this one.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_address())
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def accepted(listening: socket.socket) -> Iterator[Channel[FromEngineStub, ToEngineStub]]:
    """Yield a channel to each stage of this server that connects, until `listening` is shut."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        if _is_of_this_server(connection):
            yield Channel(connection, ToEngineStub)
        else:
            connection.close()


def _address() -> bytes:
    """Return the name of the socket, the same in all stages of one server and in no other."""
    server = os.getppid()
    fields = Path(f"/proc/{server}/stat").read_text(encoding="ascii", errors="replace")
    start_time = fields.rpartition(")")[2].split()[_START_TIME]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0trident-unary-{namespace}-{server}-{start_time}".encode()


def _is_of_this_server(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(data)
        return is_sibling(pid, uid)
    return False
