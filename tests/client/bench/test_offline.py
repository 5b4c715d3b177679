"""The script for machines without a network, except for its downloads."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "client" / "bench" / "offline.sh"
BIN = Path(sys.executable).parent

# Takes the place of a module: prints its arguments, and what can be imported.
MODULE = """
import importlib.util, json, sys
modules = ("engine", "torch", "packed")
found = {name: importlib.util.find_spec(name).origin for name in modules}
print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, **found}))
"""
# What only machines with a network, Triton's processes or plots need.
ELSEWHERE = {"huggingface_hub", "gguf", "triton_python_backend_utils", "typer", "matplotlib"}
ELSEWHERE |= {"pydantic_core"}  # comes with pydantic
OURS = {"engine", "kernels", "tests"}


def call(*arguments: str, path: Path = BIN) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_shellcheck() -> None:
    checked = subprocess.run([BIN / "shellcheck", SCRIPT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_it_says_how_it_is_called() -> None:
    for arguments in ([], ["pack", "3.12"], ["pack", "3.12", "file", "x"], ["run", "file"], ["x"]):
        done = call(*arguments)
        assert done.returncode == 2
        assert "offline.sh pack 3.12 FILE [server]" in done.stderr
        assert not done.stdout


def test_what_is_packed_is_downloaded_in_the_versions_of_the_project(tmp_path: Path) -> None:
    """With a pip that notes what it is asked for."""
    python = tmp_path / "python3"
    python.write_text(
        f"""#!/bin/bash
if [[ $* == *" pip "* ]]; then
  echo "$@" >> {tmp_path}/asked; while [[ ${{1:-}} != --requirement && $# -gt 0 ]]; do shift; done
  [[ $# -lt 2 ]] || cat "$2" >> {tmp_path}/asked
else exec {sys.executable} "$@"; fi
"""
    )
    python.chmod(0o755)
    assert call("pack", "3.12", str(tmp_path / "out"), path=tmp_path).returncode == 0
    asked = (tmp_path / "asked").read_text()
    assert "--python-version 3.12 " in asked
    assert "numpy>=2,<3\n" in asked  # without tritonserver
    assert "tritonclient" not in asked
    named = {re.match(r"[\w-]+", line)[0] for line in asked.splitlines()[1:]}  # type: ignore[index]
    # All that is imported there, and nothing else but what transformers renders templates with.
    files = [*ROOT.glob("engine/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    files += [*ROOT.glob("tests/gpu/**/*.py"), *ROOT.glob("tests/kernels/**/*.py")]
    files += [ROOT / "tests" / "conftest.py", ROOT / "tests" / "factories" / "greedy.py"]
    found = set().union(*map(imported, files)) - sys.stdlib_module_names - OURS - ELSEWHERE
    assert found | {"jinja2"} == named | {"torch", "triton"}


def imported(file: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def test_packed_packages_come_before_those_of_the_machine(tmp_path: Path) -> None:
    files = {"packed/__init__.py": "", "packed/command.py": MODULE}
    packed = tmp_path / "packed.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    done = call("run", str(packed), "-m", "packed.command", "--out", "folder")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["arguments"] == ["--out", "folder"]
    assert said["packed"].startswith(said["prefix"])
    assert said["engine"] == str(ROOT / "engine" / "__init__.py")
    assert not Path(said["prefix"]).exists(), "what was unpacked is still there"
