"""`trident serve` in a folder of hostile files, with letters beyond ASCII and a dead proxy.

One start carries all of it: no file of the folder may be run, no hop of our own may take the proxy,
and neither the model's folder nor its chat template has ASCII names only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.launch.gpu import has_gpu

pytestmark = pytest.mark.server

TRIDENT = Path(sys.executable).parent / "trident"
MODEL = "模型-ü"
TEMPLATE = "{% for message in messages %}模型ü: {{ message.content }}\n{% endfor %}"
OURS = ("client", "engine", "kernels", "model", "model_repository")
PACKAGES = (
    *("numpy", "torch", "transformers", "tokenizers", "jinja2", "pydantic", "msgspec", "psutil"),
    *("grpc", "tritonclient", "aiohttp", "fastapi", "uvicorn", "typer", "rich", "llguidance"),
    *("sitecustomize", "usercustomize", "triton", "triton_python_backend_utils"),
)
DEAD_PROXY = "http://127.0.0.1:1"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Served:
    """A running `trident serve`.

    Attributes:
        folder: where it was started.
        environ: with which.
        gateway: its URL.
        grpc: `host:port`.
        output: what it printed while it started.
    """

    folder: Path
    environ: dict[str, str]
    gateway: str
    grpc: str
    output: str

    def post(self, route: str, **body: Any) -> Any:
        """Return the gateway's answer."""
        request = urllib.request.Request(
            f"{self.gateway}{route}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        for _ in range(60):  # a worker, of which there are two, may not be connected yet
            try:
                with _DIRECT.open(request, timeout=60) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                problem, is_final = error.read().decode(), error.code != 503
            if is_final:
                break
            time.sleep(0.5)
        raise AssertionError(problem)

    def run(self, *command: str) -> str:
        """Return what a command prints that is run in the folder."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def imported(self) -> list[str]:
        """Return the names of the hostile files that were run."""
        return sorted(path.name for path in (self.folder / "imported").iterdir())


def write_hostile_files(folder: Path) -> None:
    """Write a module for each name that a program may import, which leaves a mark there."""
    (folder / "imported").mkdir()
    for name in {*sys.stdlib_module_names, *OURS, *PACKAGES}:
        mark = folder / "imported" / name
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")


def locale_variables(name: str) -> dict[str, str]:
    """Return the environment of this process, with no other locale than `name`, which may be ""."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LC_", "LANG", "PYTHON")) and key.lower() != "no_proxy"
    }
    return {**kept, **({"LC_ALL": name} if name else {})}


@pytest.fixture(
    scope="module",
    params=["C", *(pytest.param(name, marks=pytest.mark.large) for name in ("", "C.UTF-8"))],
)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("start") / "a ü"
    (folder / "tmp").mkdir(parents=True)
    shutil.copytree(checkpoint, folder / MODEL)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_hostile_files(folder)
    environ = {
        **locale_variables(request.param),
        **dict.fromkeys(PROXIES, DEAD_PROXY),
        "TMPDIR": str(folder / "tmp"),
        "XDG_STATE_HOME": str(folder),
    }
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    command = [str(TRIDENT), "serve", f"./{MODEL}", "--dtype=float32", *ports]
    process = subprocess.Popen(
        [*command, "--openai-workers=2", "--num-gpu-blocks-override=100"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C stops" in line:
                break
        output = "".join(lines)
        found = re.search(r"OpenAI +(http://\S+)/v1", output), re.search(r"gRPC +(\S+:\d+)", output)
        assert all(found), output
        yield Served(folder, environ, *(each[1] for each in found if each), output)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_log_of_a_start_is_ascii_but_for_names(served: Served) -> None:
    text = served.output.replace(MODEL, "").replace(served.folder.name, "")
    assert text.isascii(), sorted({each for each in text if not each.isascii()})


@pytest.mark.skipif(has_gpu(), reason="tells what a GPU lacks, if anything")
def test_log_of_a_start_without_a_gpu_has_no_error_of_tritonserver(served: Served) -> None:
    assert "model_lifecycle.cc" in served.output
    assert re.findall(r"^[WEF]\d{4} .*|^.*NVML.*", served.output, re.MULTILINE) == []


def test_serve_beside_hostile_files_imports_none(served: Served) -> None:
    assert served.imported() == []


def test_chat_of_a_folder_with_letters_beyond_ascii(served: Served) -> None:
    messages = [{"role": "user", "content": "grüße"}]
    ids = served.post("/tokenize", messages=messages)["tokens"]
    assert served.post("/detokenize", tokens=ids)["prompt"] == "模型ü: grüße\n"
    answer = served.post(
        "/v1/chat/completions", model=f"./{MODEL}", messages=messages, max_tokens=2
    )
    assert answer["usage"]["completion_tokens"] == 2


def test_grammar_beside_hostile_files_imports_none(served: Served) -> None:
    answer = served.post(
        "/v1/completions", prompt="a", max_tokens=4, structured_outputs={"choice": ["b", "c"]}
    )
    assert answer["choices"][0]["text"] in ("b", "c")
    assert served.imported() == []


@pytest.mark.parametrize("url", ["grpc", "gateway"])
def test_run_beside_hostile_files_imports_none(served: Served, url: str) -> None:
    address = str(getattr(served, url))
    served.run(str(TRIDENT), "run", "--url", address, "--max-tokens", "2", "hello")
    served.run(sys.executable, "-P", "-m", "client.cli", "health", "--url", address)
    assert served.imported() == []


def test_metrics_of_the_server_with_a_dead_proxy_are_shown(served: Served) -> None:
    with _DIRECT.open(f"{served.gateway}/metrics", timeout=10) as response:
        assert b"vllm:generation_tokens_total" in response.read()
