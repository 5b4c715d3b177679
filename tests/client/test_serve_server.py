"""`trident serve` with the real tritonserver, on a scripted model repository."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from openai import APIError, InternalServerError, OpenAI

from client import cli
from engine.launch.environment import RUN_ID
from tests.client.scripted_model import write_repository
from tests.waiting import eventually

pytestmark = pytest.mark.server

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository"))


class Launcher:
    """`trident serve` as a process of its own, in a temporary directory of its own."""

    def __init__(self, repository: Path, folder: Path, *arguments: str, **environ: str) -> None:
        self._folder = folder
        ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
        self.process = subprocess.Popen(
            [
                *[sys.executable, "-m", "client.cli", "serve", *ports, *arguments],
                *["--model-repository", str(repository)],
            ],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, text: str) -> str:
        """Return what it printed up to the line with `text`."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
        raise AssertionError("".join(lines))

    def run_id(self) -> str:
        (path,) = self._folder.glob("trident-*")
        return path.name

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal, wait for the end, return the exit status and the rest of the output."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


def _processes(run_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_ID) == run_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _nothing_left(run_id: str, folder: Path) -> bool:
    regions = list(Path("/dev/shm").glob(f"{run_id}*"))
    return not (_processes(run_id) or regions or list(folder.glob("trident-*")))


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address.removesuffix('/v1')}/health/ready", timeout=5):
            return True
    except OSError:
        return False


def _kept_log(output: str, folder: Path) -> str:
    """Return the content of the log that `output` names, the only one that is left."""
    (named,) = re.findall(r"^ *log: (.+)$", output, re.MULTILINE)
    assert list((folder / "trident").iterdir()) == [Path(named)]
    return Path(named).read_text()


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    launched: list[Launcher] = []

    def start(*arguments: str, **environ: str) -> Launcher:
        launched.append(Launcher(repository, tmp_path, *arguments, **environ))
        return launched[-1]

    yield start
    for each in launched:
        if each.process.poll() is None:
            each.end(signal.SIGTERM)
        assert each.process.stdout is not None
        each.process.stdout.close()


class TestServeCommand:
    def test_printed_curl_line_works_and_sigterm_ends_it_cleanly(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        output = launcher.wait_for("Ctrl-C stops")
        assert "Trident is ready. ready: script, KV cache for 0 tokens" in output
        assert "Administration is closed; to open it, set TRIDENT_ADMIN_KEY" in output
        (curl,) = re.findall(r"^curl .*$", output, re.MULTILINE)
        assert shutil.which("curl"), "curl is needed to try the line"
        answer = subprocess.run(curl, shell=True, capture_output=True, check=True, text=True)
        assert "fox" in json.loads(answer.stdout)["text_output"]
        run_id = launcher.run_id()
        assert _processes(run_id)
        status, rest = launcher.end(signal.SIGTERM)
        assert status == 0, rest
        assert _nothing_left(run_id, tmp_path)
        assert not list((tmp_path / "trident").iterdir())

    def test_the_gateway_beside_it(self, launch: Callable[..., Launcher], tmp_path: Path) -> None:
        launcher = launch("--openai-workers=2", "--api-key=sk-a")
        output = launcher.wait_for("Ctrl-C stops")
        (address,) = re.findall(r"OpenAI +(http://\S+)", output)
        # The server trusts the gateway's tenants: another tenant_key would be refused.
        with OpenAI(base_url=address, api_key="sk-a", max_retries=0) as client:
            names = [model.id for model in client.models.list()]
            assert names == ["demo", "ensemble"]
            answer = client.completions.create(model="demo", prompt="a fox")
            assert "fox" in answer.choices[0].text
            run_id = launcher.run_id()
            gateway = next(
                p
                for p in psutil.Process(launcher.process.pid).children()
                if "gateway" in p.cmdline()
            )
            worker = "client.gateway.processes.worker"
            workers = [p for p in gateway.children() if worker in p.cmdline()]
            assert len(workers) == 2
            (folder,) = tmp_path.glob("trident_gateway_*")
            gateway.kill()
            launcher.wait_for("the gateway has died (exit status -9); starting it again in 0 s")
            assert not psutil.wait_procs(workers, 30)[1]
            assert not folder.exists()
            assert eventually(lambda: _is_up(address))
            answer = client.completions.create(model="demo", prompt="a fox")
            assert "fox" in answer.choices[0].text
        status, output = launcher.end(signal.SIGTERM)
        assert status == 0, output
        assert _nothing_left(run_id, tmp_path)

    def test_without_a_gateway(self, launch: Callable[..., Launcher]) -> None:
        launcher = launch("--openai-port=off")
        assert "OpenAI" not in launcher.wait_for("Ctrl-C stops")
        assert len(psutil.Process(launcher.process.pid).children()) == 1

    @pytest.mark.parametrize(
        "number",
        [
            signal.SIGINT,
            pytest.param(signal.SIGTERM, marks=pytest.mark.large),
            pytest.param(signal.SIGHUP, marks=pytest.mark.large),
        ],
    )
    def test_interrupted_while_loading(
        self, launch: Callable[..., Launcher], tmp_path: Path, number: signal.Signals
    ) -> None:
        launcher = launch(SCRIPT_LOAD_S="60")
        launcher.wait_for("loading the script")
        run_id = launcher.run_id()
        status, _ = launcher.end(number)
        assert status == 130
        assert _nothing_left(run_id, tmp_path)

    def test_model_that_cannot_load(self, launch: Callable[..., Launcher], tmp_path: Path) -> None:
        launcher = launch(SCRIPT_FAIL="/m: config.json is missing")
        status, output = launcher.end()
        assert status == 1
        assert "trident: /m: config.json is missing\n  --model takes a folder" in output
        assert not list(tmp_path.glob("trident-*"))
        assert "config.json is missing" in _kept_log(output, tmp_path)

    def test_flag_that_tritonserver_does_not_know(self, launch: Callable[..., Launcher]) -> None:
        status, output = launch("--frobnicate=3").end()
        assert status == 1
        assert "trident: unrecognized option '--frobnicate=3'" in output

    def test_tritonserver_that_dies_is_started_again_behind_its_gateway(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        output = launcher.wait_for("Ctrl-C stops")
        (address,) = re.findall(r"OpenAI +(http://\S+)", output)
        first = launcher.run_id()
        (server,) = (p for p in _processes(first) if p.name() == "tritonserver")
        with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="demo", prompt=" ".join(["word"] * 3000), stream=True
            )
            assert next(stream).choices[0].text == "word"
            server.kill()
            with pytest.raises(APIError, match="the server is unavailable"):
                list(stream)
            with pytest.raises(InternalServerError) as refused:
                client.completions.create(model="demo", prompt="a fox")
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"
            launcher.wait_for("tritonserver was killed by SIGKILL; starting it again in 0 s")
            launcher.wait_for("tritonserver is ready again")
            assert eventually(lambda: _is_up(address))
            answer = client.completions.create(model="demo", prompt="a fox")
            assert "fox" in answer.choices[0].text
        second = launcher.run_id()
        assert first != second
        status, output = launcher.end(signal.SIGTERM)
        assert status == 0, output
        assert all(_nothing_left(each, tmp_path) for each in (first, second))
        (log,) = (tmp_path / "trident").iterdir()
        assert log.read_text().count("loading the script") == 2

    def test_killed_launcher_takes_the_server_with_it(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        launcher.wait_for("Ctrl-C stops")
        run_id = launcher.run_id()
        launcher.end(signal.SIGKILL)
        assert eventually(lambda: not _processes(run_id))
        assert "loading the script" in (tmp_path / "trident" / f"{run_id}.log").read_text()
        # What else remains in the file system goes with the next start.
        again = launch(SCRIPT_FAIL="no")
        again.end()
        assert _nothing_left(run_id, tmp_path)
