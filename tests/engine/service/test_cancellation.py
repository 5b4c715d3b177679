import queue
import socket
import threading
import time

from engine.service.cancellation import CancelListener, CancelPoller, CancelSender


def test_a_uid_reaches_the_listener() -> None:
    heard: queue.Queue[int] = queue.Queue()
    listener = CancelListener(heard.put)
    sender = CancelSender()
    for uid in (1, 2**63 + 5):
        sender.send(listener.address, uid, listener.proof(uid))
        assert heard.get(timeout=5) == uid
    listener.close()
    sender.send(
        listener.address, 3, b""
    )  # the engine stub has gone: nothing to do, nothing to raise
    sender.close()


def test_other_datagrams_are_ignored() -> None:
    heard: queue.Queue[int] = queue.Queue()
    listener = CancelListener(heard.put)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        for data in (b"", b"short", b"x" * 24, b"much too long for a uid and its proof"):
            raw.sendto(data, b"\0" + listener.address.encode())
    sender = CancelSender()
    sender.send(listener.address, 9, listener.proof(9))
    assert heard.get(timeout=5) == 9
    sender.close()
    assert heard.empty()
    listener.close()


def test_the_proof_of_one_uid_cancels_no_other() -> None:
    heard: queue.Queue[int] = queue.Queue()
    listener, other = CancelListener(heard.put), CancelListener(heard.put)
    sender = CancelSender()
    sender.send(listener.address, 8, listener.proof(9))
    sender.send(listener.address, 8, other.proof(8))
    sender.send(listener.address, 8, b"")
    sender.send(listener.address, 9, listener.proof(9))
    assert heard.get(timeout=5) == 9
    assert heard.empty()
    sender.close()
    listener.close()
    other.close()


def test_each_listener_has_an_address_of_its_own() -> None:
    one, two = CancelListener(lambda uid: None), CancelListener(lambda uid: None)
    assert one.address != two.address
    one.close()
    two.close()


def test_the_poller_asks_until_told_not_to() -> None:
    heard: queue.Queue[int] = queue.Queue()
    asked: list[int] = []
    poller = CancelPoller(heard.put)

    def never() -> bool:
        asked.append(1)
        return False

    poller.watch(1, never)
    poller.watch(2, lambda: True)
    assert heard.get(timeout=5) == 2
    time.sleep(0.25)
    assert heard.empty()  # reported once
    assert asked
    poller.forget(1)
    poller.forget(1)
    poller.close()


def test_no_question_is_asked_once_a_request_is_forgotten() -> None:
    asking, answer = threading.Event(), threading.Event()
    asked_late: list[int] = []
    poller = CancelPoller(lambda uid: None)

    def slow() -> bool:
        asking.set()
        answer.wait(5)
        return False

    poller.watch(1, slow)
    poller.watch(2, lambda: bool(asked_late.append(2)))
    assert asking.wait(5)  # and 2 is next

    def forget() -> None:
        poller.forget(1)
        poller.forget(2)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    forgetting.join(0.1)
    assert forgetting.is_alive()  # until 1 has been answered
    answer.set()
    forgetting.join(5)
    num_asked = len(asked_late)
    time.sleep(0.25)
    assert len(asked_late) == num_asked
    poller.close()
