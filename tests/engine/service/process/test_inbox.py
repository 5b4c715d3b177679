import threading

from engine.protocol.messages import Abort, AddRequest, Shutdown, Start, ToEngine
from engine.protocol.token_ids import pack_token_ids
from engine.service.process.inbox import Inbox


def add(uid: int, tenant: str = "", length: int = 1) -> AddRequest:
    return AddRequest(uid, pack_token_ids([1] * length), {}, tenant=tenant)


def drain(inbox: Inbox) -> list[ToEngine]:
    messages = []
    while (message := inbox.get(wait=False)) is not None:
        messages.append(message)
    return messages


def make() -> tuple[Inbox, list[int]]:
    """Return an inbox, and the uids of the requests that it has dropped."""
    dropped: list[int] = []
    return Inbox(lambda request: dropped.append(request.uid)), dropped


def test_an_abort_overtakes_new_requests_and_drops_its_own() -> None:
    inbox, dropped = make()
    for message in (add(2), add(3), Abort(3), Abort(1), add(4)):
        inbox.put(message)
    assert dropped == [3]
    taken = [(type(m).__name__, getattr(m, "uid", None)) for m in drain(inbox)]
    assert taken == [("Abort", 1), ("AddRequest", 2), ("AddRequest", 4)]


def test_a_request_that_was_taken_out_is_the_engines() -> None:
    inbox, _ = make()
    inbox.put(add(1))
    assert inbox.get(wait=False) is not None
    inbox.put(add(2))
    inbox.put(Abort(1))
    assert inbox.get(wait=False) == Abort(1)


def test_the_end_does_not_wait_for_requests_but_for_the_start() -> None:
    inbox, _ = make()
    for message in (Start({}), add(1), add(2), Shutdown()):
        inbox.put(message)
    assert drain(inbox) == [Start({}), Shutdown()]


def test_tenants_requests_are_taken_in_turn() -> None:
    """By their prompts: a burst of one tenant keeps another's request waiting for one of it."""
    inbox, dropped = make()
    for uid in range(1, 9):
        inbox.put(add(uid, "many", 10_000))
    for uid in (9, 10):
        inbox.put(add(uid, "few"))
    inbox.put(Abort(9))
    assert dropped == [9]
    uids = [message.uid for message in drain(inbox) if isinstance(message, AddRequest)]
    assert uids == [10, *range(1, 9)]
    inbox.put(add(11))
    inbox.put(Abort(11))
    assert drain(inbox) == []


def test_get_waits_for_a_message() -> None:
    inbox, _ = make()
    threading.Timer(0.05, inbox.put, [Abort(7)]).start()
    assert inbox.get(wait=True) == Abort(7)
