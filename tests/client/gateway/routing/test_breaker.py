"""The circuit breaker with a clock of its own: any sequence of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from client.gateway.routing.server import FAILURES, FIRST_PAUSE_S, MAX_PAUSE_S, CircuitBreaker


class Breaker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = CircuitBreaker(clock=lambda: self.now)
        self.in_a_row = 0  # failures since the last success
        self.left_alone_until: float | None = None

    @rule(seconds=st.floats(0, 2 * MAX_PAUSE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.in_a_row, self.left_alone_until = 0, None
        assert self.breaker.state == "closed"

    @precondition(lambda self: self.breaker.state == "closed")
    @rule()
    def fail(self) -> None:
        self.in_a_row += 1
        self.breaker.failed()
        if self.in_a_row >= FAILURES:
            assert self.breaker.state == "open"
            self.left_alone_until = self.now + FIRST_PAUSE_S
        else:
            assert self.breaker.state == "closed"

    @precondition(lambda self: self.breaker.state != "closed")
    @rule()
    def fail_late(self) -> None:
        """A request from before it opened: no news."""
        before = self.breaker.state
        self.breaker.failed()
        assert self.breaker.state == before

    @rule()
    def trip(self) -> None:
        self.breaker.trip()
        assert self.breaker.state == "open"
        self.left_alone_until = self.now + FIRST_PAUSE_S

    @rule()
    def try_it(self) -> None:
        state = self.breaker.state
        assert self.breaker.take_trial() == (state != "open")
        if state == "half_open":  # one trial, then none for a pause
            assert not self.breaker.take_trial()
            self.left_alone_until = self.now + FIRST_PAUSE_S

    @invariant()
    def it_is_left_alone(self) -> None:
        if self.left_alone_until is None:
            assert self.breaker.state == "closed"
        else:
            assert self.breaker.state == "open" or self.now >= self.left_alone_until

    @invariant()
    def it_is_tried_again(self) -> None:
        now, self.now = self.now, self.now + MAX_PAUSE_S
        assert self.breaker.state != "open"
        self.now = now


TestBreaker = Breaker.TestCase
TestBreaker.settings = settings(max_examples=40, stateful_step_count=30)


def test_the_pauses_grow_while_trials_fail() -> None:
    now = 0.0
    breaker = CircuitBreaker(clock=lambda: now)
    pauses = []
    for _ in range(6):
        breaker.trip()
        begun = now
        while breaker.state == "open":
            now += 0.25
        pauses.append(now - begun)
    assert pauses == [1, 2, 4, 4, 4, 4]
