"""The script for machines without a network, except for its downloads."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "client" / "bench" / "offline.sh"
BIN = Path(sys.executable).parent

# Replaces the command: prints its arguments, and whether it can import all packages.
COMMAND = """
import importlib.util, json, sys
modules = ("engine", "torch", "packed")
found = {name: importlib.util.find_spec(name).origin for name in modules}
print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, **found}))
"""


def call(*arguments: str, path: Path = BIN) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_shellcheck() -> None:
    checked = subprocess.run([BIN / "shellcheck", SCRIPT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_it_says_how_it_is_called() -> None:
    for arguments in ([], ["pack", "3.12"], ["run"], ["other", "file"]):
        done = call(*arguments)
        assert done.returncode == 2
        assert "offline.sh pack 3.12 FILE" in done.stderr
        assert not done.stdout


def test_packed_packages_come_before_those_of_the_machine(tmp_path: Path) -> None:
    files = {"packed/__init__.py": "", "client/cli.py": COMMAND}
    packed = tmp_path / "packed.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        for name, content in {**files, "client/__init__.py": ""}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    done = call("run", str(packed), "--concurrency", "64,256")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["arguments"] == ["bench", "--through", "engine,grpc", "--concurrency", "64,256"]
    assert said["packed"].startswith(said["prefix"])
    assert said["engine"] == str(ROOT / "engine" / "__init__.py")
    assert not Path(said["prefix"]).exists(), "what was unpacked is still there"
