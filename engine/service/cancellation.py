"""Polls requests for cancellation, which Triton reports only when asked.

For requests to the model `engine` itself, and for those that are answered once. Requests of the
ensemble are cancelled through the detokenizer: see `engine.service.link`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("trident.cancellation")

# Each check is a round trip between a stub and the server: of all requests together there are so
# many per second, of each one within these limits.
_CHECKS_PER_S = 200  # of 0.16 ms each
_LEAST_INTERVAL_S = 0.05
_MOST_INTERVAL_S = 2.0

OnCancel = Callable[[int], None]


def check_interval_s(num_requests: int) -> float:
    """Return the seconds between two checks of each of `num_requests`."""
    return min(max(num_requests / _CHECKS_PER_S, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)


class CancelPoller:
    """Asks each watched request every `check_interval_s` whether it was cancelled."""

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
        while not self._stopped.wait(check_interval_s(len(self._watched))):
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
