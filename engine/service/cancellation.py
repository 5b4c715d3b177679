"""Polls requests made to the model `engine` itself for cancellation.

Triton reports a cancellation only on request. Requests of the ensemble are cancelled through
the detokenizer: see `engine.service.link`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("trident.cancellation")

POLL_INTERVAL_S = 0.05

OnCancel = Callable[[int], None]


class CancelPoller:
    """Asks each watched request every `POLL_INTERVAL_S` whether it was cancelled.

    Each check is an inter-process round trip of up to 0.1 ms, too expensive per token.
    """

    def __init__(self, on_cancel: OnCancel) -> None:
        self._on_cancel = on_cancel
        self._watched: dict[int, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancel-poller", daemon=True)
        self._thread.start()

    def watch(self, uid: int, is_cancelled: Callable[[], bool]) -> None:
        """Begin to poll `is_cancelled`."""
        with self._lock:
            self._watched[uid] = is_cancelled

    def forget(self, uid: int) -> None:
        """Stop polling; unknown uids are ignored. On return no check is in progress.

        A check of a request that has been answered would crash the server.
        """
        with self._lock:
            self._watched.pop(uid, None)

    def close(self) -> None:
        """Stop all polling; on return `on_cancel` is not called any more."""
        self._stopped.set()
        self._thread.join(timeout=5)

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
            except Exception:  # a failing check must not stop the others
                log.exception("request %d cannot be asked whether it was cancelled", uid)
                self._watched.pop(uid, None)
                return False
