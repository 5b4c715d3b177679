"""How the engine stub learns that a client has gone.

A cancel of an ensemble request reaches only the step that runs then, which is the detokenizer;
Triton never tells the engine. So the detokenizer sends the request's uid back over a unix datagram
socket. Anybody may call the detokenizer with a message of his own making: so a proof goes with the
uid, which the engine stub alone can give, and nobody ends the requests of others. A request made to
the engine directly can be asked itself, from time to time.
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

log = logging.getLogger("trident.cancellation")

_UID = struct.Struct("<Q")
_PROOF_BYTES = 16
_DATAGRAM_BYTES = _UID.size + _PROOF_BYTES
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
POLL_INTERVAL_S = 0.05

OnCancel = Callable[[int], None]


class CancelListener:
    """Receives uids of cancelled requests and hands each to `on_cancel`, in a thread of its own.

    The socket is in the abstract namespace: no file is left behind. Only datagrams of processes
    of the same user count.
    """

    def __init__(self, on_cancel: OnCancel) -> None:
        self.address = f"trident-{secrets.token_hex(8)}"
        self._key = secrets.token_bytes(32)
        self._on_cancel = on_cancel
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(b"\0" + self.address.encode())
        self._thread = threading.Thread(target=self._run, name="cancel-listener", daemon=True)
        self._thread.start()

    def proof(self, uid: int) -> bytes:
        """Return what must come with `uid` to cancel it."""
        return hashlib.blake2b(_UID.pack(uid), key=self._key, digest_size=_PROOF_BYTES).digest()

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=5)
        self._socket.close()

    def _run(self) -> None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(_DATAGRAM_BYTES + 1, space)
            if not ancillary:  # shut down
                return
            uid = self._verified(data) if _sender(ancillary) == os.getuid() else None
            if uid is not None:
                self._on_cancel(uid)
            else:
                log.warning("ignored a datagram that is no cancellation by this user")

    def _verified(self, data: bytes) -> int | None:
        if len(data) != _DATAGRAM_BYTES:
            return None
        uid: int = _UID.unpack_from(data)[0]
        return uid if hmac.compare_digest(data[_UID.size :], self.proof(uid)) else None


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the user id of who sent a datagram, as the kernel states it."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(_CREDENTIALS.unpack(data)[1])
    return None


class CancelSender:
    """The detokenizer's end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, address: str, uid: int, proof: bytes) -> None:
        """Say that the client of `uid` has gone. Lost if the engine is: then nothing is to do.

        Args:
            address: of the `CancelListener`.
            uid: at least 0.
            proof: as its `proof` gave it.
        """
        with contextlib.suppress(OSError):
            self._socket.sendto(_UID.pack(uid) + proof, b"\0" + address.encode())

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


class CancelPoller:
    """Asks each watched request every `POLL_INTERVAL_S` whether it was cancelled.

    The question is an inter-process round trip of up to 0.1 ms, too dear to ask per token.
    """

    def __init__(self, on_cancel: OnCancel) -> None:
        self._on_cancel = on_cancel
        self._watched: dict[int, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="cancel-poller", daemon=True).start()

    def watch(self, uid: int, is_cancelled: Callable[[], bool]) -> None:
        """Begin to ask `is_cancelled`."""
        with self._lock:
            self._watched[uid] = is_cancelled

    def forget(self, uid: int) -> None:
        """Stop asking; unknown uids are ignored. On return no question is under way.

        To ask Triton about a request that has been answered would crash the server.
        """
        with self._lock:
            self._watched.pop(uid, None)

    def close(self) -> None:
        """Stop asking at all."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_INTERVAL_S):
            with self._lock:
                uids = list(self._watched)
            for uid in uids:
                if self._is_cancelled(uid):
                    self.forget(uid)
                    self._on_cancel(uid)

    def _is_cancelled(self, uid: int) -> bool:
        with self._lock:  # `forget` waits for the answer
            is_cancelled = self._watched.get(uid)
            try:
                return is_cancelled is not None and is_cancelled()
            except Exception:  # one that cannot be asked must not keep others from being asked
                log.exception("request %d cannot be asked whether it was cancelled", uid)
                self._watched.pop(uid, None)
                return False
