"""The flags of `trident bench compare`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from client import cli
from client.bench.compare.peer import PeerCommand, parse_peers
from client.bench.compare.trident import Trident, parse_variants
from client.bench.compare.workload import GROWTH
from client.bench.errors import BenchError
from engine.demo import CHECKPOINT_DIR
from engine.launch.errors import ServerStartError


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
