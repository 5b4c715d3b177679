"""When a request is tried again, by arithmetic alone: no server, no clock, no chance."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from client import RetryPolicy
from client.errors import (
    ConfigurationError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    TridentClientError,
    UnavailableError,
)
from client.exchange import Exchange
from client.request import completion
from client.response import read_chunks

POLICIES = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 30),
    first_delay_s=st.floats(0, 100),
    factor=st.floats(1, 1000),
    max_delay_s=st.floats(0, 1000),
    jitter=st.floats(0, 1),
)
CHANCES = st.floats(0, 1, exclude_max=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _exchange(
    clock: Clock, retry: RetryPolicy | None, timeout: float | None = None, chance: float = 0.0
) -> Exchange[object]:
    request = completion("a", None, {}, priority=0, request_id="")
    exchange = Exchange[object](
        request,
        read_chunks,
        url="host:1",
        total=math.inf if timeout is None else timeout,
        read_timeout=math.inf,
        retry=retry,
        clock=clock,
        chance=lambda: chance,
    )
    exchange.start()
    return exchange


class TestSchedule:
    @given(POLICIES)
    def test_is_bounded_and_grows_before_jitter(self, policy: RetryPolicy) -> None:
        delays = list(policy.delays(lambda: 0.0))
        assert len(delays) == policy.attempts - 1
        assert delays == sorted(delays)
        assert all(0 <= delay <= policy.max_delay_s for delay in delays)
        for early, late in pairwise(delays):
            assert math.isclose(late, min(early * policy.factor, policy.max_delay_s))

    @given(POLICIES, CHANCES)
    def test_jitter_only_shortens_and_by_its_share_at_most(
        self, policy: RetryPolicy, chance: float
    ) -> None:
        longest = policy.delays(lambda: 0.0)
        for delay, bound in zip(policy.delays(lambda: chance), longest, strict=True):
            assert bound * (1 - policy.jitter) <= delay <= bound

    def test_the_default_lasts_some_seconds(self) -> None:
        assert list(RetryPolicy().delays(lambda: 0.0)) == [0.5, 1.5, 4.5]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("attempts", 0),
            ("first_delay_s", -1),
            ("factor", 0.5),
            ("max_delay_s", math.nan),
            ("max_delay_s", math.inf),
            ("jitter", 1.1),
        ],
    )
    def test_wrong_values_are_named(self, name: str, value: float) -> None:
        with pytest.raises(ConfigurationError, match=name):
            RetryPolicy(**{name: value})


class TestDeadline:
    @given(POLICIES, st.floats(0.001, 1000), CHANCES, st.floats(0, 50))
    def test_no_pause_reaches_it_and_every_attempt_gets_what_is_left(
        self, policy: RetryPolicy, timeout: float, chance: float, attempt_s: float
    ) -> None:
        clock = Clock()
        deadline = clock.now + timeout
        exchange = _exchange(clock, policy, timeout, chance)
        attempts = 0
        with suppress(RequestTimeoutError):
            while True:
                message = exchange.message(batched=True)
                attempts += 1
                left = exchange.time_left()
                assert left is not None
                assert math.isclose(left, deadline - clock.now)
                assert _server_timeout_s(message) >= left
                clock.now += attempt_s
                delay = exchange.delay_before_retry(UnavailableError("gone"))
                if delay is None:
                    break
                clock.now += delay
                assert clock.now < deadline
        assert 1 <= attempts <= policy.attempts

    def test_without_one_all_attempts_are_made_and_the_server_is_told_none(self) -> None:
        exchange = _exchange(Clock(), RetryPolicy(attempts=3))
        message = exchange.message(batched=True)
        assert "timeout" not in [tensor.name for tensor in message.inputs]
        assert exchange.time_left() is None
        for _ in range(2):
            exchange.delay_before_retry(UnavailableError("gone"))
        assert exchange.delay_before_retry(UnavailableError("gone")) is None

    @pytest.mark.parametrize("timeout", [0, -1.5])
    def test_no_time_at_all(self, timeout: float) -> None:
        with pytest.raises(RequestTimeoutError):
            _exchange(Clock(), None, timeout).message(batched=True)

    @pytest.mark.parametrize("timeout", [math.inf, 1e300])
    def test_endless(self, timeout: float) -> None:
        assert _exchange(Clock(), None, timeout).time_left() is None

    def test_whatever_gRPC_says_when_it_has_passed_is_the_timeout(self) -> None:  # noqa: N802
        clock = Clock()
        exchange = _exchange(clock, RetryPolicy(), timeout=5)
        error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), None)
        assert isinstance(exchange.error(error), ServerError)
        clock.now += 5
        assert isinstance(exchange.error(error), RequestTimeoutError)
        assert isinstance(exchange.ended_here(), RequestTimeoutError)


class TestDecision:
    def test_a_request_that_could_not_be_written(self) -> None:
        nothing = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core"
        )
        known = _exchange(Clock(), None).error(error)
        assert isinstance(known, UnavailableError)
        assert str(known) == (
            "the server at host:1 is unavailable: the connection broke while it was asked"
        )

    @pytest.mark.parametrize(
        ("error", "again"),
        [
            (UnavailableError("no server"), True),
            (QueueFullError("full"), True),
            (InvalidRequestError("wrong"), False),
            (RequestCancelledError("cancelled"), False),
            (RequestTimeoutError("late"), False),
            (ServerError("broken"), False),
        ],
    )
    def test_by_the_kind_of_error(self, error: TridentClientError, again: bool) -> None:
        exchange = _exchange(Clock(), RetryPolicy())
        assert exchange.delay_before_retry(error) == (0.5 if again else None)

    def test_never_if_switched_off(self) -> None:
        assert _exchange(Clock(), None).delay_before_retry(UnavailableError("gone")) is None

    @pytest.mark.parametrize("with_data", [True, False])
    def test_not_after_the_first_data(self, with_data: bool) -> None:
        exchange = _exchange(Clock(), RetryPolicy())
        response = service_pb2.ModelStreamInferResponse()
        if with_data:
            output = response.infer_response.outputs.add(name="text_output", datatype="BYTES")
            output.shape.append(1)
            response.infer_response.raw_output_contents.append(b"\0\0\0\0")
        assert len(exchange.read(response)) == with_data
        delay = exchange.delay_before_retry(exchange.unfinished())
        assert delay == (None if with_data else 0.5)


def _server_timeout_s(message: service_pb2.ModelInferRequest) -> float:
    names = [tensor.name for tensor in message.inputs]
    content = message.raw_input_contents[names.index("timeout")]
    return int.from_bytes(content, "little") / 1e6
