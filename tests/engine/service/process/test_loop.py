"""What the engine's loop does between two steps, with a clock that the test moves."""

from collections.abc import Callable

from engine.errors import QueueFullError, TridentError
from engine.protocol.messages import (
    AddRequest,
    FromEngine,
    Ready,
    RequestFailed,
    SequenceOutput,
    Shutdown,
    Stats,
)
from engine.protocol.step_outputs import NO_OUTPUTS, StepOutputs
from engine.protocol.token_ids import pack_token_ids
from engine.service.process.inbox import Inbox
from engine.service.process.loop import MAX_ARRIVALS_S, EngineLoop


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeCore:
    """Takes `add_s` to add a request and `step_s` for a step; writes down what it is told."""

    ready = Ready(512, 10_000, 100, 16, 1584, 64, "a fake")

    def __init__(self, clock: Clock, add_s: float, step_s: float) -> None:
        self.clock, self.add_s, self.step_s = clock, add_s, step_s
        self.running: set[int] = set()
        self.calls: list[str] = []
        self.displaced: list[RequestFailed] = []  # by the next request that is added
        self.on_step: Callable[[], None] = lambda: None

    def add_request(self, request: AddRequest) -> list[RequestFailed]:
        self.clock.now += self.add_s
        self.running.add(request.uid)
        self.calls.append("add")
        displaced, self.displaced = self.displaced, []
        return displaced

    def abort(self, uid: int) -> StepOutputs:
        self.running.discard(uid)
        return NO_OUTPUTS

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> StepOutputs:
        self.clock.now += self.step_s
        self.calls.append("step")
        self.on_step()
        return NO_OUTPUTS

    def check_idle(self) -> None: ...

    def take_stats(self) -> Stats:
        return Stats(0, 0, 0.0)


def add(uid: int) -> AddRequest:
    return AddRequest(uid, pack_token_ids([1]), {}, arrival_time=0.0)


def run(core: FakeCore, clock: Clock, inbox: Inbox) -> list[FromEngine | StepOutputs]:
    said: list[FromEngine | StepOutputs] = []
    EngineLoop(core, inbox, said.append, clock).run()
    return said


def bursts(core: FakeCore, num_requests: int) -> list[int]:
    """Return how many requests are added before each step, after a first one that runs alone."""
    inbox = Inbox(lambda request: None)
    inbox.put(add(0))

    def on_step() -> None:
        if core.calls.count("step") == 2:
            for uid in range(1, num_requests + 1):
                inbox.put(add(uid))
        if core.calls.count("add") == num_requests + 1:
            inbox.put(Shutdown())

    core.on_step = on_step
    run(core, core.clock, inbox)
    return [len(part.split()) for part in " ".join(core.calls).split("step")][:-1]


def test_a_burst_delays_a_running_request_by_no_more_than_a_step_takes() -> None:
    counts = bursts(FakeCore(Clock(), add_s=0.001, step_s=0.004), 20)
    assert counts[:2] == [1, 0]
    assert all(1 <= count <= 5 for count in counts[2:])
    assert sum(counts) == 21


def test_a_burst_delays_long_steps_by_no_more_than_the_limit() -> None:
    counts = bursts(FakeCore(Clock(), add_s=0.001, step_s=10.0), 100)
    assert max(counts) <= MAX_ARRIVALS_S / 0.001 + 1
    assert sum(counts) == 101


def test_each_step_takes_at_least_one_arrival() -> None:
    assert bursts(FakeCore(Clock(), add_s=1.0, step_s=0.001), 3) == [1, 0, 1, 1, 1]


def test_a_burst_at_an_idle_engine_is_taken_before_the_first_step() -> None:
    core = FakeCore(Clock(), add_s=0.0001, step_s=0.0)
    inbox = Inbox(lambda request: None)
    for uid in range(50):
        inbox.put(add(uid))
    core.on_step = lambda: inbox.put(Shutdown())
    run(core, core.clock, inbox)
    assert core.calls == ["add"] * 50 + ["step"]


def test_an_iteration_begins_with_the_first_message_and_ends_with_the_wait() -> None:
    clock = Clock()
    core = FakeCore(clock, add_s=3.0, step_s=4.0)
    seen: list[float] = []

    class Watched(Inbox):
        def get(self, *, wait: bool) -> object:  # type: ignore[override]
            if wait:
                clock.now += 1000
                seen.append(loop.iteration_s)
            return super().get(wait=wait)

    inbox = Watched(lambda request: None)
    loop = EngineLoop(core, inbox, lambda message: None, clock)
    inbox.put(add(1))

    def on_step() -> None:
        seen.append(loop.iteration_s)
        if core.calls.count("step") == 2:
            inbox.put(Shutdown())

    core.on_step = on_step
    inbox.put(add(2))
    loop.run()
    assert seen == [0.0, 7.0, 7.0]  # the second request is taken after the first step


def test_requests_whose_place_another_one_takes_are_refused() -> None:
    clock = Clock()
    core = FakeCore(clock, add_s=0.0, step_s=0.0)
    refused = RequestFailed(7, QueueFullError("no place").report())
    core.displaced = [refused]
    inbox = Inbox(lambda request: None)
    inbox.put(add(8))

    def on_step() -> None:
        core.running.clear()
        inbox.put(Shutdown())

    core.on_step = on_step
    assert [each for each in run(core, clock, inbox) if not isinstance(each, Stats)] == [refused]


def test_a_request_that_fails_in_a_step_is_reported_behind_its_outputs() -> None:
    clock = Clock()
    output = SequenceOutput(uid=8, index=0, token_ids=[5], window_ids=[])
    failed = RequestFailed(8, TridentError("internal error").report())

    class Failing(FakeCore):
        def step(self) -> StepOutputs:
            self.running.clear()
            inbox.put(Shutdown())
            return StepOutputs.of([output, failed])

    inbox = Inbox(lambda request: None)
    inbox.put(add(8))
    said = run(Failing(clock, add_s=0.0, step_s=0.0), clock, inbox)
    outputs, *others = [each for each in said if not isinstance(each, Stats)]
    assert isinstance(outputs, StepOutputs)
    assert list(outputs.rows()) == [output]
    assert others == [failed]
