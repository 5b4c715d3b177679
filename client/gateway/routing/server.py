"""Server: one Triton server as the pool sees it, behind a circuit breaker."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from client.aio import AsyncTridentClient
from client.errors import QueueFullError, TridentClientError, UnavailableError
from client.gateway.routing.prefixes import PrefixTree
from client.protocol import Health

log = logging.getLogger("trident.gateway")

TREE_BLOCKS = 2**16  # 16 MiB of prompts, in 8 MiB of memory
HEALTH_TIMEOUT_S = 2.0

State = Literal["closed", "open", "half_open"]

FAILURES = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 4.0


class CircuitBreaker:
    """Closed: requests go through. Open: none do. Half open: one trial decides.

    It opens after `FAILURES` failures in a row, or at once by `trip`; each trial that fails doubles
    the pause before the next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._trial_at: float | None = None  # None: closed

    @property
    def state(self) -> State:
        """What becomes of a request now."""
        if self._trial_at is None:
            return "closed"
        return "open" if self._clock() < self._trial_at else "half_open"

    def take_trial(self) -> bool:
        """Return whether the caller is to try the server; of many callers one, if it is half open.

        A trial of which nothing more is heard counts for nothing: after the pause comes another.
        """
        if self.state == "half_open":
            self._trial_at = self._clock() + self._pause
            return True
        return self.state == "closed"

    def succeeded(self) -> None:
        """Record an answer of the server."""
        self._failures, self._pause, self._trial_at = 0, FIRST_PAUSE_S, None

    def failed(self) -> None:
        """Record that the server did not answer."""
        self._failures += 1
        if self._trial_at is None and self._failures >= FAILURES:
            self.trip()

    def trip(self) -> None:
        """Open, or stay open for twice as long."""
        if self._trial_at is not None:
            self._pause = min(2 * self._pause, MAX_PAUSE_S)
        self._trial_at = self._clock() + self._pause


class Server:
    """A server's client, breaker and load, and the prompts it has probably cached."""

    def __init__(self, url: str, client: AsyncTridentClient) -> None:
        self.url = url
        self.client = client
        self.breaker = CircuitBreaker()
        self.tree = PrefixTree(TREE_BLOCKS)
        self.in_flight = 0  # requests of this process
        self._of_others = 0  # of other processes, when last heard of
        self._problem: str | None = None  # the last that was logged; None: it is well

    @property
    def load(self) -> int:
        """Requests that the server has, as far as is known here."""
        return self.in_flight + self._of_others

    @property
    def is_well(self) -> bool:
        """Whether it answered when it was last asked."""
        return self.breaker.state == "closed"

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in flight, and how it ends."""
        self.in_flight += 1
        try:
            yield
        except QueueFullError:
            raise  # it is well, and has much to do
        except UnavailableError as error:
            self._failed(error)
            if not self.is_well:
                self.tree.clear()  # what comes back has an empty cache
            raise self._told(error) from None
        finally:
            self.in_flight -= 1

    async def health(self, timeout: float | None) -> Health:
        """Return the state of the engine; as `AsyncTridentClient.health`."""
        try:
            return await self.client.health(timeout)
        except UnavailableError as error:
            raise self._told(error) from None

    async def check(self) -> None:
        """Ask for the server's health, unless the breaker is open, and take note of the answer."""
        if not self.breaker.take_trial():
            return
        in_flight = self.in_flight
        try:
            health = await self.client.health(HEALTH_TIMEOUT_S)
        except UnavailableError as error:
            self._lost(str(error))
        except TridentClientError as error:
            self._failed(error)  # no answer in time: it may only be busy
        else:
            own = max(in_flight, self.in_flight)  # it may have had those before or those after
            self._of_others = max(health.num_in_flight - own, 0)
            self._heard(health)

    def _heard(self, health: Health) -> None:
        if health.is_ready:
            self.succeeded()
        else:
            self._lost(f"its engine is {health.state}: {health.detail}".removesuffix(": "))

    def succeeded(self) -> None:
        """Record an answer of the server."""
        self.breaker.succeeded()
        if self._problem is not None:
            log.info("server %s takes requests again", self.url)
            self._problem = None

    def _failed(self, error: TridentClientError) -> None:
        """Record that the server did not answer; after several times it counts as lost."""
        self.breaker.failed()
        if not self.is_well:
            self._report(str(error), anew=False)

    def _told(self, error: UnavailableError) -> UnavailableError:
        """Return the error for clients of the gateway: without the address of its server."""
        return type(error)(str(error).replace(f" at {self.url}", ""))

    def _lost(self, problem: str) -> None:
        self.breaker.trip()
        self.tree.clear()
        self._report(problem, anew=True)

    def _report(self, problem: str, *, anew: bool) -> None:
        """Log why requests do not go to the server, if they did, or if `anew` and the why is new.

        Requests that fail in different ways would otherwise fill the log.
        """
        if self._problem is None or (anew and problem != self._problem):
            log.warning("server %s is not used: %s", self.url, problem)
            self._problem = problem
