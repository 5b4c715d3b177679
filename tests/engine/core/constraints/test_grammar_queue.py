"""Requests wait for their grammars in nobody's way."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import QueueFullError, RequestError
from engine.protocol.messages import AddRequest, RequestFailed, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.spec import GrammarSpec
from tests.factories.outputs import listed


class _Gate(GrammarCompiler):
    """Compiles nothing before it is opened."""

    opened: threading.Event

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        self.opened.wait(30)
        return super()._compile(spec)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    _Gate.opened = threading.Event()
    monkeypatch.setattr("engine.core.engine_core.GrammarCompiler", _Gate)
    yield _Gate.opened
    _Gate.opened.set()


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def core(checkpoint: Path, request: pytest.FixtureRequest, gate: threading.Event) -> EngineCore:
    fields = {"model": str(checkpoint), "dtype": "float32", "async_scheduling": request.param}
    return EngineCore(EngineConfig.parse(fields))


def add(
    core: EngineCore, uid: int, timeout_s: float | None = None, tenant: str = "", **fields: Any
) -> None:
    params = {"max_tokens": 8, "temperature": 0, **fields}
    prompt = pack_token_ids([5, 6, 7])
    message = AddRequest(uid, prompt, params, timeout_s=timeout_s, stream=False, tenant=tenant)
    core.add_request(message)


def step(core: EngineCore) -> list[SequenceOutput | RequestFailed]:
    outputs = core.step()
    core.check_integrity()
    return [*listed(outputs), *outputs.failures]


def run(core: EngineCore, until: int = 0) -> list[SequenceOutput | RequestFailed]:
    """Step until `until` requests are left; return all outputs."""
    found, deadline = [], time.monotonic() + 30
    while len(core.scheduler.unfinished) > until or (not until and core.has_unfinished_requests()):
        assert time.monotonic() < deadline
        found += step(core)
    return found


REGEX = {"structured_outputs": {"regex": "[a-c]{4}"}}


def test_others_run_meanwhile(core: EngineCore, gate: threading.Event) -> None:
    add(core, 1, **REGEX)
    add(core, 2, ignore_eos=True)
    assert {output.uid for output in run(core, until=1)} == {2}
    assert core.take_stats().num_waiting == 1
    assert [step(core) for _ in range(5)] == [[]] * 5
    gate.set()
    [output] = run(core)
    assert isinstance(output, SequenceOutput)
    assert (output.uid, output.finish_reason) == (1, "stop")
    core.check_idle()


def test_aborted_and_expired_while_they_wait(core: EngineCore, gate: threading.Event) -> None:
    add(core, 1, n=3, **REGEX)
    add(core, 2, timeout_s=0.05, **REGEX)
    add(core, 3, **REGEX)
    assert [o.finish_reason for o in listed(core.abort(1))] == ["abort"] * 3
    [expired] = run(core, until=1)
    assert isinstance(expired, SequenceOutput)
    assert (expired.uid, expired.finish_reason) == (2, "abort")
    gate.set()
    assert {output.uid for output in run(core)} == {3}
    core.check_idle()


def test_what_nobody_waits_for_is_not_compiled(core: EngineCore, gate: threading.Event) -> None:
    compiled: list[Future[LLMatcher]] = []
    compile_one = core._grammars._compiler.compile

    def noted(spec: GrammarSpec, tenant: str) -> Future[LLMatcher]:
        compiled.append(compile_one(spec, tenant))
        return compiled[-1]

    core._grammars._compiler.compile = noted  # type: ignore[method-assign]
    add(core, 1, structured_outputs={"regex": "first"})
    add(core, 2, structured_outputs={"regex": "second"})
    add(core, 3, structured_outputs={"regex": "second"})
    core.abort(2)
    step(core)
    assert not compiled[1].cancelled()  # 3 waits for it
    core.abort(3)
    add(core, 4, structured_outputs={"regex": "third"})
    step(core)
    assert compiled[1].cancelled()
    gate.set()
    assert {output.uid for output in run(core)} == {1, 4}


def test_one_tenants_grammars_are_bounded_and_keep_no_other_out(
    core: EngineCore, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def regex(number: int) -> dict[str, Any]:
        return {"structured_outputs": {"regex": f"{number}[a-c]"}}

    monkeypatch.setattr("engine.core.constraints.grammar_queue._MAX_COST", 3 * 2**18)
    for uid in (1, 2):
        add(core, uid, tenant="many", **regex(uid))
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of .* of grammars reached"):
        add(core, 3, tenant="many", **regex(3))
    add(core, 4, tenant="many", **regex(1))  # what waits already
    add(core, 5, tenant="few", **regex(5))
    core.abort(2)
    add(core, 6, tenant="many", **regex(6))
    gate.set()
    assert {output.uid for output in run(core)} == {1, 4, 5, 6}
    assert not core._grammars._costs
    core.check_idle()


def test_a_step_looks_at_no_grammar_that_waits(core: EngineCore, gate: threading.Event) -> None:
    class Unscanned(dict[int, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("each request that waits is looked at")

        values = items = __iter__

    for uid in range(1, 20):
        add(core, uid, structured_outputs={"choice": [str(uid)]})
    core._grammars._waiting = Unscanned(core._grammars._waiting)
    for _ in range(3):
        step(core)
    core.abort(19)
    gate.set()
    assert {output.uid for output in run(core)} == set(range(1, 19))


def test_a_grammar_that_cannot_be_compiled_fails_its_requests(
    core: EngineCore, gate: threading.Event
) -> None:
    add(core, 1, n=2, guided_regex="(?=a)b")
    add(core, 2, structured_outputs={"regex": "(?=a)b"})
    add(core, 3, **REGEX)
    gate.set()
    found = {output.uid: output for output in run(core)}
    for uid, field in [(1, "guided_regex"), (2, "structured_outputs.regex")]:
        failure = found[uid]
        assert isinstance(failure, RequestFailed)
        assert failure.error.code == RequestError.code
        assert failure.error.params == (field,)
    assert isinstance(found[3], SequenceOutput)
    core.check_idle()


def test_a_fault_of_the_compiler_fails_the_request_alone(
    core: EngineCore, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: _Gate, spec: GrammarSpec) -> LLMatcher:
        raise OSError("no more processes")

    monkeypatch.setattr(_Gate, "_compile", broken)
    add(core, 1, **REGEX)
    add(core, 2)
    found = {output.uid: output for output in run(core)}
    assert isinstance(found[1], RequestFailed)
    assert found[1].error.message == "internal error"
    assert isinstance(found[2], SequenceOutput)


def test_a_known_grammar_starts_at_once(core: EngineCore, gate: threading.Event) -> None:
    gate.set()
    add(core, 1, **REGEX)
    first = run(core)
    add(core, 2, **REGEX)
    assert not core.scheduler.waiting
    core.step()
    assert core.scheduler.running
    second = run(core)
    assert isinstance(first[0], SequenceOutput)
    assert isinstance(second[0], SequenceOutput)
    assert first[0].token_ids == second[0].token_ids


def test_a_wrong_field_is_refused_when_it_arrives(core: EngineCore) -> None:
    with pytest.raises(RequestError, match="structured_outputs: give exactly one"):
        add(core, 1, structured_outputs={})
    core.check_idle()
