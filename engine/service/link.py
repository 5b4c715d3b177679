"""The link between the engine stub and the detokenizer stub, beside Triton's tensors.

To the detokenizer it carries proof that a message comes from the engine stub, because any client
may call the model `detokenizer` with bytes of its own. To the engine it carries cancellations: a
cancel of an ensemble request reaches only the step that runs then, which is the detokenizer. And it
carries failures: an error response of the detokenizer would end the ensemble's request while the
engine still works on it, and Triton would never release such a request. And it acknowledges
messages that have arrived, so that the engine stub sends no more than the detokenizer takes.

The engine stub listens on a datagram socket in the abstract namespace, so no file is left behind.
Each message starts with the name of that socket, from which the detokenizer gets the key of
the MACs of both directions once. It is given and taken only between processes of the same user with
the same parent, which is tritonserver. So models load in any order, and each may be reloaded alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import psutil

log = logging.getLogger("trident.link")

_NAME_BYTES = 8  # of the engine's socket, random
_MAC_BYTES = 16
_KEY_BYTES = 32
_SIZE = struct.Struct("<Q")
_HEADER_BYTES = _NAME_BYTES + 2 * _MAC_BYTES
_NEWS = struct.Struct("<cQ")  # what it is about; the uid of a request, or number of a message
_CANCELLED, _FAILED, _ARRIVED = b"c", b"f", b"a"
_NEWS_PERSON = b"news"  # so that its MAC is no MAC of a message
_NEWS_BYTES = 2048  # of one datagram, with the text of an error
_KEY_REQUEST = b"key?"
_KEY_TIMEOUT_S = 5.0
_MAX_KEYS = 8  # of engine stubs; while a model is reloaded there are two
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)


class ForgedMessageError(ValueError):
    """A message that was not made by the engine stub of this server."""


class EngineEnd:
    """The engine stub's end: seals messages, and hears of requests that end in the detokenizer.

    `on_cancel` is called with the uid of each request whose client has gone, `on_failure` with that
    of each that the detokenizer cannot answer and why, `on_arrival` with the numbers of messages
    that have got there; all in a thread of the link's own.
    """

    def __init__(
        self,
        on_cancel: Callable[[int], None],
        on_failure: Callable[[int, str], None],
        on_arrival: Callable[[int], None],
    ) -> None:
        self._name = secrets.token_bytes(_NAME_BYTES)
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._on_cancel = on_cancel
        self._on_failure = on_failure
        self._on_arrival = on_arrival
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(_address(self._name))
        self._thread = threading.Thread(target=self._run, name="detokenizer-link", daemon=True)
        self._thread.start()

    def seal(self, payload: bytes) -> bytes:
        """Return `payload` with a header that authenticates it (a MAC)."""
        size_mac, mac = _size_mac(self._key, len(payload)), _mac(self._key, payload)
        return b"".join((self._name, size_mac, mac, payload))

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=5)
        self._socket.close()

    def _run(self) -> None:
        while True:
            data, ancillary, _, sender = self._socket.recvmsg(_NEWS_BYTES, _CREDENTIALS_SPACE)
            if not ancillary:  # shut down
                return
            if data == _KEY_REQUEST and _is_from_sibling(ancillary):
                with contextlib.suppress(OSError):  # it has gone
                    self._socket.sendto(self._key, sender)
            elif hmac.compare_digest(
                data[:_MAC_BYTES], _mac(self._key, data[_MAC_BYTES:], _NEWS_PERSON)
            ):
                self._hear(data[_MAC_BYTES:])
            else:
                log.warning("ignored a datagram of a process that is no stage of this server")

    def _hear(self, news: bytes) -> None:
        what, number = _NEWS.unpack_from(news)
        if what == _CANCELLED:
            self._on_cancel(number)
        elif what == _FAILED:
            self._on_failure(number, news[_NEWS.size :].decode("utf-8", "replace"))
        else:
            assert what == _ARRIVED
            self._on_arrival(number)


class DetokenizerEnd:
    """The detokenizer stub's end. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}  # by name of the engine's socket
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def open(self, message: memoryview) -> memoryview:
        """Return the payload of a message; a forged one costs no time in proportion to its size.

        Raises:
            ForgedMessageError: it is none of `EngineEnd.seal` in this server.
        """
        header, payload = bytes(message[:_HEADER_BYTES]), message[_HEADER_BYTES:]
        if len(header) < _HEADER_BYTES:
            raise ForgedMessageError
        key = self._key(header[:_NAME_BYTES])
        size_mac, mac = header[_NAME_BYTES:-_MAC_BYTES], header[-_MAC_BYTES:]
        if not hmac.compare_digest(size_mac, _size_mac(key, len(payload))):
            raise ForgedMessageError
        if not hmac.compare_digest(mac, _mac(key, payload)):
            raise ForgedMessageError
        return payload

    def cancel(self, message: memoryview, uid: int) -> None:
        """Report to the engine stub that sealed `message` that the client of `uid` has gone.

        Lost if that stub has ended: then there is nothing to cancel.
        """
        self._send(message, _CANCELLED, uid)

    def fail(self, message: memoryview, uid: int, error: str) -> None:
        """Have it end the request `uid` with `error`, because it cannot be answered."""
        text = error.encode("utf-8", "replace")[: _NEWS_BYTES - _MAC_BYTES - _NEWS.size]
        self._send(message, _FAILED, uid, text)

    def acknowledge(self, message: memoryview, number: int) -> None:
        """Acknowledge its message of this number."""
        self._send(message, _ARRIVED, number)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, message: memoryview, what: bytes, number: int, text: bytes = b"") -> None:
        name, news = bytes(message[:_NAME_BYTES]), _NEWS.pack(what, number) + text
        with contextlib.suppress(OSError, ForgedMessageError):
            self._socket.sendto(_mac(self._key(name), news, _NEWS_PERSON) + news, _address(name))

    def _key(self, name: bytes) -> bytes:
        key = self._keys.get(name)
        if key is None:
            key = _ask_for_key(name)
            if len(self._keys) == _MAX_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[name] = key
        return key


def _address(name: bytes) -> bytes:
    return b"\0trident-" + name.hex().encode()


def _mac(key: bytes, payload: bytes | memoryview, person: bytes = b"") -> bytes:
    return hashlib.blake2b(payload, key=key, digest_size=_MAC_BYTES, person=person).digest()


def _size_mac(key: bytes, size: int) -> bytes:
    data = _SIZE.pack(size)
    return hashlib.blake2b(data, key=key, digest_size=_MAC_BYTES, person=b"size").digest()


def _ask_for_key(name: bytes) -> bytes:
    """Return the key of the engine stub that listens under `name`.

    Raises:
        ForgedMessageError: no stub of this server does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        asking.settimeout(_KEY_TIMEOUT_S)
        try:
            asking.bind(b"")  # the kernel chooses a name, to which the answer goes
            asking.sendto(_KEY_REQUEST, _address(name))
            key, ancillary, _, _ = asking.recvmsg(_KEY_BYTES, _CREDENTIALS_SPACE)
        except OSError:
            raise ForgedMessageError from None
    if not _is_from_sibling(ancillary) or len(key) != _KEY_BYTES:
        raise ForgedMessageError
    return key


def is_sibling(pid: int, uid: int) -> bool:
    """Whether a process is this user's, which `uid` must be, and has the same parent as ours."""
    with contextlib.suppress(psutil.Error, ValueError):
        return uid == os.getuid() and psutil.Process(pid).ppid() == os.getppid()
    return False


def _is_from_sibling(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Whether a datagram comes from a process of this user with the same parent as ours."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack(data)
            return is_sibling(pid, uid)
    return False
