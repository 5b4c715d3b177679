"""The options of `trident bench`."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client import cli
from client.bench.errors import BenchError
from client.bench.load.plan import read_trace
from client.bench.load.prompts import PromptSource
from client.bench.load.workload import Lengths, named
from client.bench.servers.arguments import commands, variants
from client.bench.servers.trident import trident
from engine.demo import CHECKPOINT_DIR
from engine.launch.errors import ServerStartError


def test_peers_and_variants_are_read() -> None:
    found = commands(["a=serve '{model}' --port {port} x=y"])
    assert found == {"a": ["serve", "{model}", "--port", "{port}", "x=y"]}
    assert variants(["a=max_num_seqs=8 block_size=32", "b=seed=1"]) == {
        "a": {"max_num_seqs": "8", "block_size": "32"},
        "b": {"seed": "1"},
    }


@pytest.mark.parametrize(
    ("read", "texts", "error"),
    [
        (commands, ["serve"], "--peer: must be NAME=VALUE"),
        (commands, ["a=serve"], r"--peer a: the command must contain \{port\}"),
        (commands, ["a=s {port}", "a=t {port}"], "the name a is taken"),
        (commands, ["other=s {port}"], "the name other is taken"),
        (commands, ["a=s '{port}"], "cannot be read"),
        (variants, ["a"], "--trident: must be NAME=VALUE"),
        (variants, ["a=max_num_seqs"], "--trident a: must be NAME=VALUE"),
        (variants, ["other=seed=1"], "the name other is taken"),
        (variants, ["a=seed=1", "a=seed=2"], "the name a is taken"),
        (variants, ["a=seed=1 seed=2"], "--trident a: the name seed is taken"),
        (variants, ["a=model=/other"], "--trident a: cannot set the model"),
    ],
)
def test_wrong_ones_are_named(read: Callable[..., object], texts: list[str], error: str) -> None:
    with pytest.raises(BenchError, match=error):
        read(texts, taken=["other"])


def test_a_wrong_setting_is_named_before_anything_is_measured() -> None:
    with pytest.raises(ServerStartError, match="max_num_seqs"):
        trident(CHECKPOINT_DIR, {"max_num_seqs": "none"})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--workload=W1,W9"], "--workload: W9 is unknown"),
        ([], "--workload, --concurrency, --rate or --trace: give only one of them"),
        (["--rate=1,-2"], "--rate: must be numbers such as"),
        (["--rate=0"], "--rate: must be numbers above 0"),
        (["--concurrency=1.5"], "--concurrency: must be whole numbers"),
        (["--concurrency=1", "--prompt-tokens=9-3"], "--prompt-tokens: must be N, LOW-HIGH"),
        (["--concurrency=1", "--max-tokens=lognormal:5"], "--max-tokens: must be N"),
        (["--concurrency=1", "--shared-tokens=128"], "--shared-tokens: must be fewer"),
        (["--trace=/nonexistent", "--url=a=http://localhost:1/v1"], "localhost:1/v1/models lists"),
        (["--url=a=localhost:1", "--workload=W1"], "--url: must be http://HOST:PORT/v1"),
        (
            ["--through=smoke", "--workload=W1"],
            "--through: 'smoke' is unknown; known are engine, grpc",
        ),
        (
            ["--baseline=dynamic", "--workload=W1"],
            "--baseline: 'dynamic' is unknown; known are none, static",
        ),
        (["--report=/proc/none", "--workload=W1"], "--report: cannot write"),
        (["--json=/proc/none", "--workload=W1"], "--json: cannot write /proc/none"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--tiny", "--rounds=1", *arguments])
    said = str(result.exception) + result.output
    assert result.exit_code == 1
    assert error in said


def test_without_options_it_lists_what_there_is() -> None:
    said = CliRunner().invoke(cli.app, ["bench"])
    assert said.exit_code == 0
    assert "--concurrency" in said.output
    assert re.search("staggered-128 +128 users 0.07 s apart", said.output)


class TestWorkloads:
    def test_lengths(self) -> None:
        generator = random.Random(0)
        for text, low, high in (("7", 7, 7), ("3-5", 3, 5), ("lognormal:100:0.5", 5, 2000)):
            lengths = Lengths.parse("--x", text)
            assert str(lengths) == text
            drawn = [lengths.draw(generator) for _ in range(300)]
            assert low <= min(drawn) <= max(drawn) <= high
            assert (text == "7") == (min(drawn) == max(drawn))

    def test_a_trace_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        line = {"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
        other = {**line, "timestamp": 1500, "hash_ids": [1, 3]}
        path.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
        first, second = read_trace(path, PromptSource(CHECKPOINT_DIR))
        assert (first.start, second.start) == (0.5, 1.5)
        ids, others = first.turns[0].token_ids, second.turns[0].token_ids
        assert len(ids) == len(others) == 600
        assert ids[:500] == others[:500]
        assert ids != others
        assert first.turns[0].output_tokens == 5

    @pytest.mark.parametrize("text", ["{}", '{"timestamp": 0, "input_length": 0}', "", "words"])
    def test_a_trace_that_is_none_is_named(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        with pytest.raises(BenchError, match=r"--trace: .*trace\.jsonl"):
            read_trace(path, PromptSource(CHECKPOINT_DIR))

    def test_all_that_were_published_can_be_named(self) -> None:
        names = {each.name for each in named("published")}
        assert names >= {"single", "threads-100", "staggered-128", "sessions-9", "batching-ladder"}
        assert [each.name for each in named("W1,growth,W1")].count("W1") == 1
