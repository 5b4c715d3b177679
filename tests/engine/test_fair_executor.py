import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fair_executor import FairExecutor

WAIT_S = 30
SMALL = 10  # costs at most this


class Busy:
    """An executor whose first task goes on until `go_on`."""

    def __init__(self, cost: int = 1) -> None:
        self.done: list[str] = []
        self._started, self._go_on = threading.Event(), threading.Event()
        self.executor = FairExecutor("test", max_small_cost=SMALL)
        self.executor.submit(self._block, cost=cost, tenant="busy")
        assert self._started.wait(WAIT_S)

    def submit(self, name: str, cost: int, tenant: str = "") -> None:
        self.executor.submit(lambda: self.done.append(name), cost=cost, tenant=tenant)

    def close(self) -> list[str]:
        self._go_on.set()
        self.executor.close()
        return self.done

    def _block(self) -> None:
        self._started.set()
        assert self._go_on.wait(WAIT_S)


@settings(max_examples=50, deadline=None)
@given(
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, SMALL)), max_size=30),
)
def test_tenants_get_the_same_cost_done_while_they_wait(asked: list[tuple[str, int]]) -> None:
    """Within one task each; and of a tenant the tasks are done in order."""
    busy = Busy()
    for number, (tenant, cost) in enumerate(asked):
        busy.submit(f"{tenant}{number}", cost, tenant)
    done = busy.close()
    assert sorted(done) == sorted(f"{tenant}{n}" for n, (tenant, _) in enumerate(asked))
    left = Counter(tenant for tenant, _ in asked)
    costs: Counter[str] = Counter()
    for name in done:
        tenant, number = name[0], int(name[1:])
        for other, count in left.items():
            if count and other != tenant:
                assert costs[tenant] + asked[number][1] <= costs[other] + SMALL
        costs[tenant] += asked[number][1]
        left[tenant] -= 1
    for tenant in "abc":
        own = [int(name[1:]) for name in done if name[0] == tenant]
        assert own == sorted(own)


def test_newcomer_waits_for_one_task_of_each_other_tenant_at_most() -> None:
    busy = Busy()
    for number in range(100):
        busy.submit(f"many{number}", 5, "many")
    busy.submit("few", 5, "few")
    assert busy.close().index("few") <= 1


def run_beside_the_large_one(busy: Busy, tenant: str) -> None:
    done = threading.Event()
    busy.executor.submit(done.set, cost=1, tenant=tenant)
    assert done.wait(WAIT_S)


def test_small_tasks_take_no_turn_of_a_large_one() -> None:
    """A tenant's small tasks behind its many large ones let no other tenant wait for these."""
    busy = Busy(cost=1000)
    for number in range(100):
        busy.submit(f"many{number}", 1000, "many")
    run_beside_the_large_one(busy, "many")
    run_beside_the_large_one(busy, "few")
    assert busy.done == []
    busy.submit("few", 1000, "few")
    assert busy.close().index("few") <= 1


def test_large_tasks_do_not_wait_for_small_ones() -> None:
    busy = Busy()
    for number in range(100):
        busy.submit(f"small{number}", 1, str(number))
    began, go_on = threading.Event(), threading.Event()

    def large() -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    busy.executor.submit(large, cost=1000)
    busy._go_on.set()
    assert began.wait(WAIT_S)
    go_on.set()
    assert len(busy.close()) == 100


def test_small_tasks_run_beside_a_large_one() -> None:
    busy = Busy(cost=1000)
    done = threading.Event()
    busy.submit("large", 1000, "other")
    busy.executor.submit(done.set, cost=1, tenant="busy")
    assert done.wait(WAIT_S)
    assert busy.done == []
    assert busy.close() == ["large"]


def test_small_tasks_that_wait_when_a_large_one_begins_are_not_delayed() -> None:
    busy = Busy()
    small_done = threading.Event()

    def large() -> None:
        assert small_done.wait(WAIT_S)
        busy.done.append("large")

    busy.executor.submit(large, cost=1000, tenant="a")
    for _ in range(200):  # more than the large one costs
        busy.executor.submit(lambda: None, cost=10, tenant="b")
    busy.executor.submit(small_done.set, cost=10, tenant="b")
    assert busy.close() == ["large"]


def test_small_tasks_alone_run_one_after_the_other() -> None:
    busy = Busy()
    for number in range(20):
        busy.submit(str(number), 1)
    assert busy.done == []
    assert busy.close() == [str(number) for number in range(20)]


def test_a_task_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    busy = Busy()
    busy.executor.submit(lambda: 1 // 0, cost=1)  # type: ignore[arg-type, return-value]
    busy.submit("next", 1)
    assert busy.close() == ["next"]
    assert "a task of test failed" in caplog.text


def test_threads_start_when_they_are_needed() -> None:
    executor = FairExecutor("test", max_small_cost=SMALL)
    assert executor._threads == []
    executor.close()
    busy = Busy()
    assert len(busy.executor._threads) == 1
    busy.close()
    busy.executor.close()


def test_a_tenant_without_tasks_is_not_remembered() -> None:
    busy = Busy()
    for number in range(100):
        busy.submit("", 1, tenant=str(number))
    busy.close()
    assert busy.executor._small._ends == {}
