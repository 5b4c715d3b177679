"""What importing the client, and starting a command, loads; each in an interpreter of its own."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import client
from client import errors
from tests.client.fake_triton import HELLO, FakeTriton

ROOT = Path(client.__file__).parents[1]
WITHOUT_ENGINE = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def _trident(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where neither engine nor kernels can be imported."""
    return _python(f"{WITHOUT_ENGINE}\nfrom client.cli import main; main()", *arguments)


def test_the_library_loads_no_more_than_grpc_needs() -> None:
    code = "import sys, client; print(*sys.modules)"
    loaded = _python(code).stdout.split()
    assert "tritonclient.grpc.service_pb2" in loaded
    heavy = ("torch", "transformers", "engine", "kernels", "aiohttp", "geventhttpclient", "gevent")
    assert not [name for name in loaded if name.partition(".")[0] in heavy]
    assert not [name for name in loaded if name.startswith("tritonclient.http")]
    assert not [name for name in loaded if name.endswith("cuda_shared_memory")]


@pytest.mark.parametrize("command", ["run", "chat", "health"])
def test_commands_for_a_running_server_load_no_engine(command: str) -> None:
    code = f"import sys, client.cli, client.commands.{command}; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in _python(code).stdout.split()}
    assert "client" in loaded
    assert not loaded & {"torch", "transformers", "engine", "kernels", "aiohttp"}


def test_serve_and_demo_load_no_torch() -> None:
    code = "import sys, client.commands.serve, client.commands.demo; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in _python(code).stdout.split()}
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers"}


def test_help_without_engine() -> None:
    result = _trident("--help")
    assert result.returncode == 0, result.stderr
    for name in ("serve", "gateway", "demo", "run", "chat", "health", "bench"):
        assert f"\n  {name} " in result.stdout


def test_requests_without_engine(triton: FakeTriton) -> None:
    triton.pieces = HELLO
    assert _trident("health", "--url", triton.url).stdout == "healthy: 3 requests in flight\n"
    assert _trident("run", "a", "--url", triton.url).stdout == "Hello world\n"


def test_serve_without_engine_says_so_in_a_line() -> None:
    result = _trident("serve")
    assert result.returncode == 1
    message = "trident: trident serve needs the Python package engine, which is not installed\n"
    assert result.stderr == message


def test_types_are_for_others_too() -> None:
    """py.typed is there and goes into the wheel, which takes what git tracks of its packages."""
    tracked = subprocess.run(
        ["git", "ls-files", "client/py.typed"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert tracked.stdout == "client/py.typed\n"
    with (ROOT / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "client" in wheel["packages"]
    assert not [each for each in wheel.get("exclude", []) if "client" in each or "py.typed" in each]


def test_every_error_is_exported() -> None:
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TridentClientError)
    }
    assert len(own) > 10
    assert own <= set(client.__all__)
