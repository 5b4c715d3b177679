"""The load generator and the servers that it measures."""

import json
from pathlib import Path

import psutil
import pytest

from client.bench.errors import BenchError
from client.bench.load import worker
from client.bench.load.prompts import PromptSource
from client.bench.load.workload import closed
from client.bench.measure.cpu import OTHERS, STOLEN, tree_memory
from client.bench.servers import peer
from client.bench.servers.peer import peer as serve
from engine.demo import CHECKPOINT_DIR
from tests.client.bench.fakes import fake_peer, measure


class TestPeer:
    WORKLOAD = closed("W", 2, 5, 24, 6, shared=16)

    def test_is_measured(self, source: PromptSource, tmp_path: Path, quiet: list[float]) -> None:
        log = tmp_path / "requests"
        peer = fake_peer(f"--log={log}", "--loads=0.4", "--first=0.01", "--gap=0.01")
        start, one = measure(peer, self.WORKLOAD, source)
        assert start > 0.4
        assert (one.num_tokens, one.tokens_per_response, one.attempts) == (30, 1, 1)
        assert one.seconds > 3 * 6 * 0.01  # one of the two streams has three requests
        assert len(one.figures["ttft"]) == 5
        assert len(one.figures["gap"]) == 25
        assert min(one.figures["ttft"]) >= 0.01
        assert sum(one.figures["ttft"] + one.figures["gap"]) >= 5 * 6 * 0.01
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
        _, one = measure(fake_peer(f"--log={log}", "--refuse-ids"), self.WORKLOAD, source)
        assert one.num_tokens == 30
        prompts = [json.loads(line)["prompt"] for line in log.read_text().splitlines()]
        # The first request finds it out, and the generator while it warms the server up.
        assert isinstance(prompts[-8], list)
        assert not any(isinstance(prompt, list) for prompt in prompts[-7:])

    def test_that_ends_says_why(self, source: PromptSource) -> None:
        with pytest.raises(BenchError, match="ended with status 1; its last words:\nno such model"):
            measure(fake_peer("--fails"), self.WORKLOAD, source)

    def test_that_is_never_ready_says_so(
        self, source: PromptSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peer, "_START_TIMEOUT_S", 1.0)
        with pytest.raises(BenchError, match="fake: was not ready after 1 s; its last words"):
            measure(fake_peer("--loads=60"), self.WORKLOAD, source)

    def test_that_hangs_is_given_up(
        self, source: PromptSource, quiet: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker, "_ANSWER_TIMEOUT_S", 0.5)
        with pytest.raises(BenchError, match=r"the server has not answered in 0\.5 s"):
            measure(fake_peer("--first=0.8"), self.WORKLOAD, source)

    def test_that_dies_meanwhile_says_why(self, source: PromptSource, quiet: list[float]) -> None:
        message = "fake: ended with status 3; its last words:\nno memory"
        with pytest.raises(BenchError, match=message):
            measure(fake_peer("--dies-after=4"), self.WORKLOAD, source)

    def test_that_cannot_be_started_is_named(self, source: PromptSource, tmp_path: Path) -> None:
        script = tmp_path / "serve"
        script.write_text("no program")
        script.chmod(0o755)
        with pytest.raises(BenchError, match=r"b: ended with status 1; (.|\n)*Exec format error"):
            measure(serve("b", (str(script), "{port}"), CHECKPOINT_DIR), self.WORKLOAD, source)

    def test_that_is_not_installed_is_named(self, source: PromptSource) -> None:
        missing = serve("b", ("/nonexistent/serve", "{port}"), CHECKPOINT_DIR)
        with pytest.raises(BenchError, match="b: /nonexistent/serve is not installed"):
            measure(missing, self.WORKLOAD, source)

    def test_nothing_of_it_is_left(self) -> None:
        with fake_peer("--child").start() as running:
            parent = psutil.Process(running.pids[0])
            family = parent.children(recursive=True)
            assert tree_memory(parent.pid) > tree_memory(family[0].pid) > 0
        assert not any(process.is_running() for process in [parent, *family])


class TestDisturbance:
    WORKLOAD = closed("W", 1, 1, 24, 2)

    def test_the_quietest_of_three_counts(self, source: PromptSource, quiet: list[float]) -> None:
        quiet += [9000.0, 5.0, 7000.0]  # the runs vary in length
        _, one = measure(fake_peer(), self.WORKLOAD, source)
        assert one.cpu_seconds == {OTHERS: 5.0, STOLEN: 0.0}
        assert one.attempts == 3
        assert one.is_disturbed

    def test_a_quiet_run_ends_it(
        self, source: PromptSource, quiet: list[float], tmp_path: Path
    ) -> None:
        quiet += [9.0, 0.0]
        log = tmp_path / "requests"
        _, one = measure(fake_peer(f"--log={log}"), self.WORKLOAD, source)
        assert one.attempts == 2
        assert not one.is_disturbed
        prompts = [json.loads(line)["prompt"] for line in log.read_text().splitlines()]
        assert len({tuple(prompt) for prompt in prompts if prompt != "a"}) == 5  # all distinct
