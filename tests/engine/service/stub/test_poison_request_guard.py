import pytest

from engine.errors import SuspectRequestError
from engine.service.stub.admission import PoisonRequestGuard
from engine.service.stub.stream import NewRequest


def request(*token_ids: int) -> bytes:
    return NewRequest(list(token_ids), {"max_tokens": 3}).fingerprint


def test_a_request_is_known_by_its_prompt_and_its_sampling_parameters() -> None:
    params = {"max_tokens": 3}
    same = NewRequest([1, 2], params, request_id="again", priority=1, timeout_s=3.0)
    assert same.fingerprint == request(1, 2)
    others = [
        NewRequest([1], params),
        NewRequest([1, 2], {}),
        NewRequest([1, 2], {"max_tokens": 4}),
    ]
    assert len({same.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_two_deaths_are_remembered_for_ten_minutes() -> None:
    now = 0.0
    guard = PoisonRequestGuard(lambda: now)
    guard.blame([request(1), request(2)])
    guard.check(request(1))
    now = 500.0
    guard.blame([request(1)])
    with pytest.raises(SuspectRequestError, match="died each of the 2 times"):
        guard.check(request(1))
    guard.check(request(2))
    guard.check(request(3))
    now = 1099.0
    with pytest.raises(SuspectRequestError):
        guard.check(request(1))
    now = 1101.0
    guard.check(request(1))


def test_a_request_that_finishes_is_cleared() -> None:
    guard = PoisonRequestGuard()
    for _ in range(5):
        guard.blame([request(1)])
        guard.check(request(1))
        guard.clear(request(1))


def test_the_oldest_are_forgotten_first() -> None:
    guard = PoisonRequestGuard()
    for _ in range(2):
        guard.blame([request(0)])
    guard.blame(request(1, number) for number in range(16_384))
    guard.check(request(0))
