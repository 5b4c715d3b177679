"""What travels to a machine with only torch, Triton and NumPy is complete, and is checked."""

import ast
import hashlib
import importlib.metadata
import os
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.bench import __main__ as command
from engine.bench import pack
from engine.bench.gpu import packages
from engine.bench.gpu.packages import (
    LOCK,
    PACKED,
    REQUIRED,
    PackageError,
    fits,
    provide,
    unpack,
)

ROOT = Path(__file__).parents[3]
OURS = {"engine", "kernels", "tests"}
# Downloads; GGUF files; exists inside Triton alone; commands and plots: nothing done here.
ELSEWHERE = {"huggingface_hub", "gguf", "triton_python_backend_utils", "typer", "matplotlib"}


def imported(file: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def test_what_is_imported_is_packed_and_nothing_else() -> None:
    files = [*ROOT.glob("engine/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    files += [*ROOT.glob("tests/gpu/*.py"), *ROOT.glob("tests/kernels/**/*.py")]
    files += [ROOT / "tests" / "factories" / "greedy.py"]
    found = set().union(*map(imported, files)) - sys.stdlib_module_names - OURS - ELSEWHERE
    # transformers renders chat templates with jinja2, which it does not require itself.
    assert found | {"jinja2"} == {*REQUIRED, *PACKED}


def test_the_lock_has_every_package_with_its_dependencies() -> None:
    lines = LOCK.read_text().splitlines()
    pins = {line.partition("==")[0] for line in lines if "==" in line}
    assert sum("--hash=sha256:" in line for line in lines) >= len(pins)
    left, needed = list(PACKED), set()
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in needed or name in pack.UNUSED:
            continue
        needed.add(name)
        requirements = map(Requirement, importlib.metadata.requires(name) or ())
        left += [
            requirement.name
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    assert needed == pins


def test_the_pins_are_within_the_ranges_of_the_project() -> None:
    assert {line.partition(">")[0] for line in pack._requirements()} == set(PACKED)


@pytest.mark.parametrize(
    ("wheel", "version", "expected"),
    [
        ("a-1-py3-none-any.whl", (3, 12), True),
        ("a-1-py2.py3-none-any.whl", (3, 11), True),
        ("a-1-cp310-abi3-manylinux_2_17_x86_64.whl", (3, 12), True),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", (3, 12), True),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.whl", (3, 11), False),
    ],
)
def test_wheels_are_chosen_by_the_version_of_python(
    wheel: str, version: tuple[int, int], expected: bool
) -> None:
    assert fits(wheel, version) is expected


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of a package that is not installed, and its lock."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "no_such_package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("no_such_package/__init__.py", "ANSWER = 42\n")
        archive.writestr("no_such_package-1.data/purelib/no_such_module.py", "")
    (folder / "other-1-cp39-cp39-manylinux_2_17_x86_64.whl").write_text("of another Python")
    lock = tmp_path / "packages.txt"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"# A comment.\nno-such-package==1 \\\n    --hash=sha256:{digest}\n")
    monkeypatch.setattr(packages, "WHEELS", folder)
    monkeypatch.setattr(packages, "LOCK", lock)
    monkeypatch.setattr(packages, "PACKED", ("no_such_package",))
    return folder


def test_missing_packages_come_from_the_wheels(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    path = list(sys.path)
    with provide() as source:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        import no_such_package  # type: ignore[import-not-found]

        assert no_such_package.ANSWER == 42
        assert os.environ["PYTHONPATH"] == f"{sys.path[0]}{os.pathsep}before"
        assert source == "1 wheels of wheels/, as no_such_package were missing"
    assert sys.path == path
    assert os.environ["PYTHONPATH"] == "before"
    del sys.modules["no_such_package"], sys.modules["no_such_module"]


def test_a_wheel_that_was_changed_is_refused(wheels: Path, tmp_path: Path) -> None:
    wheel = next(wheels.glob("no_such_package*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(PackageError, match=r"no_such_package-1.*: its hash"):
        unpack(wheels, tmp_path)


def test_without_wheels_what_is_missing_is_named(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "WHEELS", wheels / "none")
    assert command.main([]) == 2
    said = capsys.readouterr().out
    assert said.startswith("missing Python packages: no_such_package. ")
    assert "python -m engine.bench.pack" in said
    monkeypatch.setattr(packages, "REQUIRED", ("no_such_torch",))
    assert command.main([]) == 2
    assert capsys.readouterr().out == "missing Python packages: no_such_torch\n"


def test_wheels_that_lack_a_package_are_refused(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "PACKED", ("no_such_package", "another_one"))
    with pytest.raises(PackageError, match="lacks wheels of another_one"), provide():
        pass


def test_nothing_is_unpacked_where_all_is_installed() -> None:
    path = list(sys.path)
    with provide() as source:
        assert sys.path == path
    assert source == "all packages are installed"
