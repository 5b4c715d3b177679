"""Threads that give way: only they, and by no more than there is."""

import os
import threading

import psutil

from engine.service.niceness import give_way
from engine.service.stub.engine_client import EngineClient
from tests.engine.service.stub.clients import kill, start, wait_until_ready


def test_only_the_thread_that_asks_gives_way() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert _niceness_after(1) == ours + 5
    assert _niceness_after(9) == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours


def test_the_engine_process_is_not_nicer_even_when_it_is_started_again() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    client = start()
    try:
        assert _niceness_of(client) == ours
        kill(client)
        wait_until_ready(client)
        assert client.health.num_restarts == 1
        assert _niceness_of(client) == ours
    finally:
        client.close()


def _niceness_after(times: int) -> int:
    found: list[int] = []

    def run() -> None:
        for _ in range(times):
            give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def _niceness_of(client: EngineClient) -> int:
    return int(psutil.Process(client.process_id).nice())
