"""`trident bench compare` without Trident: load generator, peers, floors and tables."""

import asyncio
import io
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from client import cli
from client.bench.compare import ceilings, load, peer
from client.bench.compare import comparison as comparing
from client.bench.compare.answer import Answer
from client.bench.compare.ceilings import Ceilings
from client.bench.compare.comparison import Comparison
from client.bench.compare.completions import take
from client.bench.compare.floors import Shape, floor
from client.bench.compare.load import first_token, run_workload
from client.bench.compare.measurement import Measurement, measurement
from client.bench.compare.memory import tree_memory
from client.bench.compare.peer import Peer, PeerCommand, parse_peers
from client.bench.compare.plot import GrowthPlot
from client.bench.compare.report import Results, Session, table
from client.bench.compare.trident import Trident, parse_variants
from client.bench.compare.workload import GROWTH, STANDARD, TINY, TINY_GROWTH, Workload
from client.bench.cpu import OTHERS, STOLEN
from client.bench.errors import BenchError
from client.bench.workload import PromptSource
from engine.demo import CHECKPOINT_DIR
from engine.demo.random_checkpoint import SIZES
from engine.launch.errors import ServerStartError
from engine.launch.ports import pick_free

SCRIPT = Path(__file__).parent / "openai_server.py"
CEILINGS = Ceilings(read=1e9, bf16=1e12, int8=4e12)


def _peer(*flags: str, name: str = "fake") -> Peer:
    command = (sys.executable, str(SCRIPT), "{model}", "--port", "{port}", *flags)
    return Peer(PeerCommand(name, command), CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(CHECKPOINT_DIR, 24)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """CPU seconds of other programs in each coming run; 0 after the last."""
    others: list[float] = []

    class Meter:
        def __init__(self, pid: int) -> None:
            assert psutil.pid_exists(pid)

        def start(self) -> None: ...

        def stop(self) -> dict[str, float]:
            return {OTHERS: others.pop(0) if others else 0.0, STOLEN: 0.0}

    monkeypatch.setattr(load, "CpuMeter", Meter)
    yield others
    assert not others


class TestEvents:
    def _answer(self, *events: Any) -> Answer:
        answer = Answer(0.0)
        for now, event in enumerate(events):
            take(answer, event if isinstance(event, bytes) else json.dumps(event).encode(), now)
        return answer

    def test_a_count_in_each_chunk_is_believed(self) -> None:
        answer = self._answer(
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 5, "completion_tokens": 0}},
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
            {"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
            b"[DONE]",
        )
        assert (answer.num_tokens, answer.num_prompt_tokens) == (3, 5)
        assert answer.arrivals == [1, 2]

    def test_without_it_each_text_is_a_token(self) -> None:
        texts = [{"choices": [{"text": text}], "usage": None} for text in ("a", "b", "")]
        answer = self._answer(*texts)
        assert (answer.num_tokens, answer.arrivals) == (2, [0, 1])

    def test_the_usage_at_the_end_corrects_the_count(self) -> None:
        answer = self._answer(
            {"choices": [{"text": "a b"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
        )
        assert (answer.num_tokens, answer.arrivals) == (4, [0])

    @pytest.mark.parametrize("event", [{"error": {"message": "out of memory"}}, b"{oops"])
    def test_no_chunk(self, event: Any) -> None:
        with pytest.raises(BenchError, match=r"out of memory|cannot be read"):
            self._answer(event)


class TestAnswer:
    def test_lengths_are_checked(self) -> None:
        good = Answer(0.0, [1.0, 2.0], num_tokens=4, num_prompt_tokens=8)
        assert good.why_unusable(8, 4) == ""
        assert replace(good, num_prompt_tokens=0).why_unusable(8, 4) == ""
        assert "answered with 4 tokens where 5" in good.why_unusable(8, 5)
        assert "counted 8 tokens in a prompt of 9" in good.why_unusable(9, 4)
        assert (good.ttft, good.gaps) == (1.0, [1.0])

    def test_measurement(self) -> None:
        answers = [Answer(10.0, [10.5, 11.0], 3), Answer(10.2, [10.4], 1)]
        used = {OTHERS: 1.0, STOLEN: 0.5}
        one = measurement(answers, cpu_seconds=used, core_seconds=2.0, memory=7)
        assert (one.num_tokens, one.num_responses, one.seconds) == (4, 3, 1.0)
        assert one.ttfts == pytest.approx([0.5, 0.2])
        assert one.gaps == [0.5]
        assert one.tokens_per_second == 4
        assert (one.others, one.stolen) == (0.5, 0.25)
        assert one.is_disturbed
        assert not replace(one, others=0.02).is_disturbed
        assert replace(one, others=0.021).is_disturbed


class TestPeerArguments:
    def test_are_read(self) -> None:
        peers = parse_peers(
            ["a=serve '{model}' --port {port}", "b=run x=y"], ["b=http://localhost:81/v1/"]
        )
        assert peers[0] == PeerCommand("a", ("serve", "{model}", "--port", "{port}"))
        assert peers[1] == PeerCommand("b", ("run", "x=y"), "http://localhost:81/v1")

    @pytest.mark.parametrize(
        ("commands", "urls", "error"),
        [
            (["serve"], [], "--peer: must be NAME=VALUE"),
            (["a=serve"], [], r"--peer a: put \{port\}"),
            (["a=s {port}", "a=t {port}"], [], "the name a is taken"),
            (["other=s {port}"], [], "the name other is taken"),
            (["a=s '{port}"], [], "cannot be read"),
            (["a=s"], ["a=localhost:81"], "--peer-url a: must begin with http"),
            (["a=s {port}"], ["a=http://localhost:{port}/v1"], "--peer-url a: must have a host"),
            (["a=s"], ["a=http://localhost:99999/v1"], "--peer-url a: must have a host"),
            (["a=s"], ["a=http:///v1"], "--peer-url a: must have a host"),
            (["a=s"], ["a=http://localhost/v1"] * 2, "--peer-url: the name a is taken"),
            (["a=s {port}"], ["b=http://localhost/v1"], "there is no peer b"),
        ],
    )
    def test_wrong_ones_are_named(self, commands: list[str], urls: list[str], error: str) -> None:
        with pytest.raises(BenchError, match=error):
            parse_peers(commands, urls, taken=["other"])


class TestVariants:
    def test_are_read(self) -> None:
        assert parse_variants(["a=max_num_seqs=8 block_size=32", "b=seed=1"]) == {
            "a": {"max_num_seqs": "8", "block_size": "32"},
            "b": {"seed": "1"},
        }

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (["a"], "--trident: must be NAME=VALUE"),
            (["a=max_num_seqs"], "--trident a: must be NAME=VALUE"),
            (["trident=seed=1"], "the name trident is taken"),
            (["a=seed=1", "a=seed=2"], "the name a is taken"),
            (["a=seed=1 seed=2"], "--trident a: the name seed is taken"),
            (["a=model=/other"], "--trident a: all serve the same model"),
        ],
    )
    def test_wrong_ones_are_named(self, arguments: list[str], error: str) -> None:
        with pytest.raises(BenchError, match=error):
            parse_variants(arguments)

    def test_a_wrong_setting_is_named_before_anything_is_measured(self) -> None:
        with pytest.raises(ServerStartError, match="max_num_seqs"):
            Trident(CHECKPOINT_DIR, {"max_num_seqs": "none"})


def _run(peer: Peer, workload: Workload, source: PromptSource) -> tuple[float, Measurement]:
    async def run() -> tuple[float, Measurement]:
        (prompt,) = source.draw("first", 1)
        start = await first_token(peer, prompt)
        return start, await run_workload(peer, workload, source, "seed")

    with peer:
        return asyncio.run(run())


class TestPeer:
    WORKLOAD = Workload("W", 2, 5, 24, 6, shared_tokens=16)

    def test_is_measured(self, source: PromptSource, tmp_path: Path, quiet: list[float]) -> None:
        log = tmp_path / "requests"
        peer = _peer(f"--requests={log}", "--loads=0.4", "--delay=0.01")
        start, one = _run(peer, self.WORKLOAD, source)
        assert start > 0.4
        assert (one.num_tokens, one.num_responses, one.attempts) == (30, 30, 1)
        assert one.seconds > 3 * 6 * 0.01  # one of the two streams has three requests
        assert len(one.ttfts) == 5
        assert len(one.gaps) == 25
        assert min(one.ttfts) >= 0.01
        assert sum(one.ttfts + one.gaps) >= 5 * 6 * 0.01
        assert one.memory > 4e6
        requests = [json.loads(line) for line in log.read_text().splitlines()]
        measured = requests[-5:]
        assert all(r["ignore_eos"] and r["model"] == "a model" for r in measured)
        assert {r["max_tokens"] for r in measured} == {6}
        assert {len(r["prompt"]) for r in measured} == {24}
        assert len({tuple(r["prompt"][:16]) for r in measured}) == 1
        assert len({tuple(r["prompt"]) for r in measured}) == 5
        assert len({r["port"] for r in measured}) == 5  # one connection per request

    def test_that_takes_no_ids_gets_text(
        self, source: PromptSource, tmp_path: Path, quiet: list[float]
    ) -> None:
        log = tmp_path / "requests"
        _, one = _run(_peer(f"--requests={log}", "--refuse-ids"), self.WORKLOAD, source)
        assert one.num_tokens == 30
        prompts = [json.loads(line)["prompt"] for line in log.read_text().splitlines()]
        assert sum(isinstance(prompt, list) for prompt in prompts) == 1

    @pytest.mark.parametrize(("tokens", "asked"), [(3, 1), (1, 4)])
    def test_that_answers_too_much_or_too_little_has_no_figure(
        self, source: PromptSource, quiet: list[float], tokens: int, asked: int
    ) -> None:
        message = f"answered with {tokens} tokens where {asked} were asked"
        with pytest.raises(BenchError, match=message):
            _run(_peer(f"--tokens={tokens}"), self.WORKLOAD, source)

    def test_that_ends_says_why(self, source: PromptSource) -> None:
        with pytest.raises(BenchError, match="ended with status 1; its last words:\nno such model"):
            _run(_peer("--fails"), self.WORKLOAD, source)

    def test_that_is_never_ready_says_so(
        self, source: PromptSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peer, "_START_TIMEOUT_S", 1.0)
        with pytest.raises(BenchError, match="fake: was not ready after 1 s; its last words"):
            _run(_peer("--loads=60"), self.WORKLOAD, source)

    def test_that_hangs_is_given_up(
        self, source: PromptSource, quiet: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(load, "_ANSWER_TIMEOUT_S", 0.5)
        with pytest.raises(BenchError, match=r"the server has not answered in 0\.5 s"):
            _run(_peer("--delay=0.3"), self.WORKLOAD, source)

    def test_that_dies_meanwhile_says_why(self, source: PromptSource, quiet: list[float]) -> None:
        with pytest.raises(
            BenchError, match="fake: ended with status 3; its last words:\nno memory"
        ):
            _run(_peer("--dies-after=4"), self.WORKLOAD, source)

    def test_that_cannot_be_started_is_named(self, source: PromptSource, tmp_path: Path) -> None:
        script = tmp_path / "serve"
        script.write_text("no program")
        script.chmod(0o755)
        with pytest.raises(BenchError, match="b: cannot be started"):
            _run(
                Peer(PeerCommand("b", (str(script), "{port}")), CHECKPOINT_DIR),
                self.WORKLOAD,
                source,
            )

    def test_at_a_url_of_its_own(self, source: PromptSource, quiet: list[float]) -> None:
        (port,) = pick_free(1)
        command = (sys.executable, str(SCRIPT), "{model}", "--port", str(port))
        own = PeerCommand("b", command, f"http://127.0.0.1:{port}/v1")
        _, one = _run(Peer(own, CHECKPOINT_DIR), self.WORKLOAD, source)
        assert one.num_tokens == 30
        with Peer(own, CHECKPOINT_DIR) as first:
            asyncio.run(first.wait_until_ready())
            with pytest.raises(BenchError, match="b: another server is at http"):
                Peer(own, CHECKPOINT_DIR).__enter__()

    def test_that_is_not_installed_is_named(self, source: PromptSource) -> None:
        peer = Peer(PeerCommand("b", ("/nonexistent/serve", "{port}")), CHECKPOINT_DIR)
        with pytest.raises(BenchError, match="b: /nonexistent/serve is not installed"):
            _run(peer, self.WORKLOAD, source)

    def test_nothing_of_it_is_left(self) -> None:
        script = "import subprocess as s, time; s.Popen(['sleep', '60']); time.sleep(60)"
        with Peer(PeerCommand("b", (sys.executable, "-c", script)), CHECKPOINT_DIR) as peer:
            parent = psutil.Process(peer.pid)
            deadline = time.monotonic() + 10
            while not (family := parent.children(recursive=True)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert tree_memory(peer.pid) > tree_memory(family[0].pid) > 0
        assert not any(process.is_running() for process in [parent, *family])


class TestDisturbance:
    WORKLOAD = Workload("W", 1, 1, 24, 2)

    def test_the_quietest_of_three_counts(self, source: PromptSource, quiet: list[float]) -> None:
        quiet += [9000.0, 5.0, 7000.0]  # the runs vary in length
        _, one = _run(_peer(), self.WORKLOAD, source)
        assert one.cpu_seconds == {OTHERS: 5.0, STOLEN: 0.0}
        assert one.attempts == 3
        assert one.is_disturbed

    def test_a_quiet_run_ends_it(
        self, source: PromptSource, quiet: list[float], tmp_path: Path
    ) -> None:
        quiet += [9.0, 0.0]
        log = tmp_path / "requests"
        _, one = _run(_peer(f"--requests={log}"), self.WORKLOAD, source)
        assert one.attempts == 2
        assert not one.is_disturbed
        prompts = [json.loads(line)["prompt"] for line in log.read_text().splitlines()]
        assert len({tuple(prompt) for prompt in prompts if prompt != "a"}) == 5  # all distinct


class TestFloors:
    def test_shape_of_the_standard_model(self, tmp_path: Path) -> None:
        _, fields = SIZES["0.4b-tied"]
        assert fields["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 32000}))
        shape = Shape.of(tmp_path)
        assert shape.layer_parameters + shape.head_parameters == 386_498_560
        assert shape.kv_bytes == 12 * 1024

    def test_arithmetic(self) -> None:
        shape = Shape(layer_parameters=900, head_parameters=100, kv_bytes=10, attention_flops=10)
        reads_only = Ceilings(read=1e3, bf16=1e12, int8=1e12)
        # Two turns of three steps each read the weights: 2 s in bf16, 1 s in int8. Attention reads
        # 2 sequences of 4, 5 and 6 tokens: 0.3 s per turn.
        both = floor(shape, Workload("W", 2, 4, 4, 3), reads_only)
        assert both.bf16 == pytest.approx(12 / (2 * (3 * 2 + 0.3)))
        assert both.int8 == pytest.approx(12 / (2 * (3 * 1 + 0.3)))
        computes_only = Ceilings(read=1e12, bf16=1e3, int8=2e3)
        # One request, 4 tokens in and 1 out: the layers for 4 rows, the head for 1, 10 pairs.
        both = floor(shape, Workload("W", 1, 1, 4, 1), computes_only)
        assert both.bf16 == pytest.approx(1 / (2 * (4 * 0.9 + 0.1) + 0.1))
        assert both.int8 == pytest.approx(1 / ((4 * 0.9 + 0.1) + 0.1))

    def test_what_is_shared_is_computed_once(self) -> None:
        shape = Shape(900, 100, 10, 10)
        computes_only = Ceilings(read=1e12, bf16=1e3, int8=1e3)
        both = floor(shape, Workload("W", 1, 2, 4, 1, shared_tokens=3), computes_only)
        # 4 rows and 10 pairs in prefill, then one row over 4 tokens.
        assert both.bf16 == pytest.approx(2 / ((7.4 + 0.1) + (2.0 + 0.04)))

    def test_the_ceilings_of_this_machine(self) -> None:
        one = ceilings.measure()
        assert 1e8 < one.read < 1e13
        assert 1e8 < one.bf16 < 1e16
        assert 1e8 < one.int8 < 1e16
        assert ceilings.highest([one, Ceilings(1e15, 1.0, 1.0)]) == replace(one, read=1e15)


def _measurement(seconds: float, others: float = 0.0) -> Measurement:
    used = {OTHERS: 0.0, STOLEN: 0.0}
    return Measurement(100, seconds, [0.1, 0.3], [0.02], 50, 2 * 10**9, used, others, stolen=0.04)


class TestReport:
    RESULTS = Results(
        workloads=STANDARD[:2],
        tridents=["trident", "int8"],
        ceilings=CEILINGS,
        floors={w.name: floor(Shape(900, 100, 10, 10), w, CEILINGS) for w in STANDARD[:2]},
        sessions={
            "trident": [
                Session(2.0, {"W1": _measurement(1.0), "W2": _measurement(1.0)}),
                Session(4.0, {"W1": _measurement(2.0)}),
            ],
            "int8": [Session(3.0, {"W1": _measurement(0.5)}), None],
            "a peer with a long name": [
                Session(60.0, {"W1": _measurement(4.0, others=0.3)}),
                None,
            ],
        },
        failures={"a peer with a long name": "ended"},
    )

    def test_rows(self) -> None:
        rows = self.RESULTS.rows()
        assert [(row.workload, row.server) for row in rows] == [
            ("W1", "trident"),
            ("W1", "int8"),
            ("W1", "a peer with a long name"),
            ("W2", "trident"),
        ]
        trident, _, peer, last = rows
        assert (trident.speed.median, trident.speed.min, trident.speed.max) == (75, 50, 100)
        assert trident.of_floor == pytest.approx(75 / self.RESULTS.floors["W1"].bf16)
        assert trident.ratios == {"trident": 1.0, "int8": 2.0}
        assert not trident.is_disturbed
        assert trident.start == 3.0
        assert peer.ratios == {"trident": 4.0, "int8": 8.0}  # of the one round that both completed
        assert last.ratios == {"trident": 1.0}
        assert peer.ttft == (pytest.approx(0.2), pytest.approx(0.298))
        assert peer.is_disturbed
        assert self.RESULTS.stolen == 0.04

    def test_the_table_fits_80_columns(self) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table(self.RESULTS))
        text = console.export_text()
        assert "…" not in text
        for cell in (
            "W1 floor bf16",
            "75.0",
            "50.0-100.0",
            "4.00",
            "8.00",
            "200.0",
            "60.0",
            "30.0*",
        ):
            assert cell in text
        assert max(map(len, text.splitlines())) <= 80

    def test_json_has_everything(self) -> None:
        data = json.loads(json.dumps(self.RESULTS.as_json()))
        assert [row["server"] for row in data["summary"]].count("trident") == 2
        assert data["rounds"]["trident"][0]["measurements"]["W2"]["num_tokens"] == 100
        assert data["rounds"]["a peer with a long name"][1] is None
        assert data["ceilings"]["read"] == 1e9
        assert data["floors"]["W1"]["int8"] > 0
        assert data["failures"] == {"a peer with a long name": "ended"}


class TestPlot:
    def _results(self) -> Results:
        peer = Session(1.0, {"S1": _measurement(2.0), "C16": _measurement(3.0)})
        every = {each.name: _measurement(1.0) for each in TINY_GROWTH.workloads}
        shape = Shape(900, 100, 10, 10)
        return Results(
            TINY_GROWTH.workloads,
            ["trident"],
            CEILINGS,
            {each.name: floor(shape, each, CEILINGS) for each in TINY_GROWTH.workloads},
            {"trident": [Session(1.0, every)], "peer": [peer], "gone": [None]},
            {"gone": "not installed"},
        )

    def test_is_a_picture_with_all_that_was_measured(self, tmp_path: Path) -> None:
        path = tmp_path / "growth.png"
        GrowthPlot(path, TINY_GROWTH).draw(self._results())
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", content[16:24])
        assert (width, height) == (1320, 960)

    def test_lines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        results = self._results()
        GrowthPlot(tmp_path / "growth.png", TINY_GROWTH).draw(results)
        by_streams, by_context, _, first_by_context = drawn[0].axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in by_streams.lines}
        floors = [[n, results.floors[f"S{n}"].bf16] for n in (1, 4)]
        assert lines == {"trident": [[1, 100], [4, 100]], "peer": [[1, 50]], "floor, bf16": floors}
        assert by_context.lines[0].get_xydata().tolist() == [[16, 100], [64, 100]]
        assert first_by_context.lines[1].get_xydata().tolist() == [[16, 0.2]]

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="--growth: cannot write"):
            GrowthPlot(tmp_path / "missing" / "growth.png", TINY_GROWTH)


def test_servers_take_turns_and_one_that_fails_is_left_out(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda: CEILINGS)
    console = Console(file=io.StringIO(), width=200)
    # The third server answers the first request, of one token, and no longer ones.
    servers = [_peer(name="a"), _peer(name="b"), _peer("--tokens=1", name="c")]
    workloads = [TINY[0], TINY[4]]
    results = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, workloads, 2, console).run()
    assert results.tridents == ["a"]
    for name in "ab":
        for session in results.sessions[name]:
            assert session is not None
            assert set(session.measurements) == {"W1", "W5"}
    first, second = results.sessions["c"]
    assert first is not None
    assert not first.measurements
    assert second is None
    assert "answered with 1 tokens where 4" in results.failures["c"]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    places = [output.index(f"round {n}, {name}, W1") for n, name in [(1, "a"), (1, "b")]]
    later = [output.index(f"round 2, {name}, W1") for name in "ba"]
    assert [*places, *later] == sorted([*places, *later])


def test_ceilings_that_fail_later_lose_nothing(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [CEILINGS]

    def measure() -> Ceilings:
        if not measured:
            raise BenchError("no ceilings")
        return measured.pop()

    monkeypatch.setattr(ceilings, "measure", measure)
    console = Console(file=io.StringIO(), width=200)
    arguments: Any = ([_peer()], [], CHECKPOINT_DIR, TINY[:1], 2, console)
    results = Comparison(*arguments).run()
    assert len(results.sessions["fake"]) == 2
    assert results.ceilings == CEILINGS
    assert "no ceilings; those of the rounds before" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(BenchError, match="no ceilings"):
        Comparison(*arguments).run()


def test_an_interrupt_leaves_what_was_measured(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda: CEILINGS)
    console = Console(file=io.StringIO(), width=200)
    servers = [_peer(name="a"), _peer(name="b")]
    workloads = [TINY[0], TINY[4]]
    comparison = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, workloads, 2, console)
    asked: list[str] = []
    pids: set[int] = set()

    async def measure(server: Any, workload: Workload, *_: Any) -> Measurement:
        asked.append(f"{server.name} {workload.name}")
        pids.add(server.pid)
        if len(asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        return _measurement(1.0)

    monkeypatch.setattr(comparing, "run_workload", measure)
    results = comparison.run()
    assert asked == ["a W1", "a W5", "b W1", "b W5", "b W1", "b W5"]
    assert results.interrupted
    (one,) = results.sessions["a"]
    complete, partial = results.sessions["b"]
    assert one is not None
    assert complete is not None
    assert partial is not None
    assert list(partial.measurements) == ["W1"]
    assert [row.server for row in results.rows()] == ["a", "b"] * 2
    assert "interrupted: this is what was measured" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_interrupt_before_anything_was_measured_is_one(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Ceilings:
        raise KeyboardInterrupt

    monkeypatch.setattr(ceilings, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Comparison([_peer()], [], CHECKPOINT_DIR, TINY[:1], 1, Console(file=io.StringIO())).run()


def test_growth_has_its_own_workloads(tmp_path: Path) -> None:
    arguments = ["bench", "compare", "--tiny", "--workloads=W1", f"--growth={tmp_path / 'g.png'}"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "--growth has its own" in result.output


def test_no_workload_of_growth_is_measured_twice() -> None:
    shapes = [(each.streams, each.prompt_tokens) for each in GROWTH.workloads]
    assert len(set(shapes)) == len(shapes) == 13


def test_an_unknown_workload_is_named() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "compare", "--tiny", "--workloads=W1,W9"])
    assert result.exit_code == 2
    assert "there is no W9" in result.output
