"""The perf_analyzer and genai-perf commands, without running either tool."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from client import cli
from client.bench import genai_perf, perf_analyzer, tools
from client.bench.cache import cache_folder
from client.bench.errors import BenchError
from client.bench.tools import Load, ToolEnvironment

LOAD = Load(streams=4, requests=20, max_tokens=8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trident"


def _script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _after(flags: list[str], flag: str) -> str:
    """The value of a flag that is given exactly once."""
    assert flags.count(flag) == 1
    return flags[flags.index(flag) + 1]


class TestPerfAnalyzerFlags:
    def test_defaults(self) -> None:
        flags = perf_analyzer.arguments("host:1", LOAD, Path("/in.json"), [])
        assert "--streaming" in flags
        assert _after(flags, "-i") == "grpc"
        assert _after(flags, "-u") == "host:1"
        assert _after(flags, "-m") == "ensemble"
        assert _after(flags, "--input-data") == "/in.json"
        assert _after(flags, "--concurrency-range") == "4"
        assert _after(flags, "--request-count") == "20"

    @pytest.mark.parametrize(
        ("further", "replaced"),
        [
            (["-m", "other"], ["ensemble"]),
            (["--input-data=/mine.json"], ["/in.json"]),
            (["--request-count", "7"], ["20"]),
            # It does not accept a request count with several of them.
            (["--concurrency-range", "1:8"], ["4", "--request-count"]),
            (["--request-rate-range=5"], ["--concurrency-range", "--request-count"]),
        ],
    )
    def test_what_is_given_takes_the_place_of_ours(
        self, further: list[str], replaced: list[str]
    ) -> None:
        flags = perf_analyzer.arguments("host:1", LOAD, Path("/in.json"), further)
        assert flags[-len(further) :] == further
        assert not set(replaced) & set(flags[: -len(further)])

    def test_input_data_ask_for_full_answers(self) -> None:
        (first, *_) = json.loads(json.dumps(perf_analyzer.input_data(8)))["data"]
        assert first["max_tokens"] == [8]
        assert json.loads(first["sampling_parameters"][0]) == {"ignore_eos": True}


class TestGenaiPerfFlags:
    def _flags(self, *further: str) -> list[str]:
        return genai_perf.arguments("host:1", "vllm", "/tok", Path("/out"), LOAD, further)

    def test_defaults(self) -> None:
        flags = self._flags()
        assert flags[0] == "profile"
        assert _after(flags, "--backend") == "vllm"
        assert _after(flags, "--tokenizer") == "/tok"
        assert _after(flags, "--artifact-dir") == "/out"
        assert _after(flags, "--concurrency") == "4"
        assert _after(flags, "--request-count") == "20"
        assert _after(flags, "--output-tokens-mean") == "8"
        assert "--output-tokens-mean-deterministic" in flags

    def test_what_is_given_takes_the_place_of_ours(self) -> None:
        assert "/out" not in self._flags("--artifact-dir", "/mine")
        assert "--concurrency" not in self._flags("--request-rate", "5")
        assert "--request-count" not in self._flags("--measurement-interval=4000")
        flags = self._flags("--output-tokens-mean=30")
        assert "8" not in flags
        assert "--output-tokens-mean-deterministic" not in flags


class TestInstallation:
    def test_the_one_on_path_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        binary = _script(tmp_path, "perf_analyzer", "exit 0")
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert perf_analyzer.find_or_install(_console()).binary == binary

    def test_one_on_path_that_does_not_start_is_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binary = _script(tmp_path, "perf_analyzer", "echo libb64.so.0d is missing >&2; exit 127")
        assert "libb64.so.0d" in perf_analyzer.PerfAnalyzer(binary).problem()
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        installed: list[str] = []

        def install(self: ToolEnvironment, requirements: list[str], **options: object) -> None:
            installed.extend(requirements)
            raise BenchError("no network")

        monkeypatch.setattr(ToolEnvironment, "install", install)
        with pytest.raises(BenchError, match="no network"):
            perf_analyzer.find_or_install(_console())
        assert installed[0] == "tritonclient==2.50.0"

    def test_goes_on_where_it_stopped(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands: list[str] = []
        statuses = iter([0, 1, 0])

        class Done:
            def __init__(self) -> None:
                self.returncode = next(statuses)

        def run(command: list[str], **options: object) -> Done:
            commands.append(" ".join(command))
            (cache / "tools/x/bin").mkdir(parents=True, exist_ok=True)
            for name in ("pip", "python"):
                (cache / "tools/x/bin" / name).touch()
            return Done()

        monkeypatch.setattr(tools.subprocess, "run", run)
        with pytest.raises(BenchError, match="pip failed with status 1"):
            ToolEnvironment("x", _console()).install(["a==1"], with_dependencies=True)
        environment = ToolEnvironment("x", _console())
        assert not environment.is_installed
        environment.install(["a==1"], with_dependencies=False)
        environment.finish()
        assert ToolEnvironment("x", _console()).is_installed
        assert [" venv " in command for command in commands] == [True, False, False]
        assert commands[-1].endswith("install --no-deps a==1")

    def test_another_system_than_debian(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(BenchError, match=r"libb64-0d .* no apt-get; .* nvcr.io/nvidia"):
            tools.extract_debian_package(ToolEnvironment("x", _console()), "libb64-0d")

    def test_no_package_lists(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _script(tmp_path, "apt-get", "exit 100")
        _script(tmp_path, "dpkg", "exit 0")
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        with pytest.raises(BenchError, match="apt-get update"):
            tools.extract_debian_package(ToolEnvironment("x", _console()), "libb64-0d")

    def test_libraries_are_found_before_those_of_the_user(self) -> None:
        tool = perf_analyzer.PerfAnalyzer(Path("/t/bin/perf_analyzer"), (Path("/t/lib"),))
        environment = tool.environment({"PATH": "/bin", "LD_LIBRARY_PATH": "/mine"})
        assert environment == {"PATH": "/t/bin:/bin", "LD_LIBRARY_PATH": "/t/lib:/mine"}
        assert tool.environment({})["LD_LIBRARY_PATH"] == "/t/lib"


class TestCommands:
    def test_hand_on_what_they_do_not_know(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binary = _script(tmp_path, "perf_analyzer", f'echo "$@" > {tmp_path}/seen; exit 3')
        tool = perf_analyzer.PerfAnalyzer(binary)
        monkeypatch.setattr(perf_analyzer, "find_or_install", lambda console: tool)
        monkeypatch.setattr(perf_analyzer, "require_server", lambda url: None)
        arguments = ["bench", "perf-analyzer", "--streams", "2", "--percentile=99", "-H", "a:b"]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 3
        seen = (tmp_path / "seen").read_text()
        assert "--concurrency-range 2 " in seen
        assert seen.endswith("--percentile=99 -H a:b\n")

    @pytest.mark.parametrize("url", ["localhost:1", "nonsense", "localhost:x"])
    def test_nobody_there(self, url: str) -> None:
        with pytest.raises(BenchError, match=f"no server answers at {url}"):
            tools.require_server(url)


def test_cache_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("tools", "x") == tmp_path / ".cache/trident/tools/x"
