"""When the library is built, found and left alone."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import build as building
from kernels.cpu import library, target
from kernels.cpu.__main__ import main
from kernels.cpu.target import TARGETS


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with no library in it, in the place of the real one."""
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.setattr(building, "BUILT", tmp_path)
    monkeypatch.setattr("sys.argv", ["kernels.cpu"])
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


def test_a_processor_is_offered_what_it_can_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*flags: str) -> list[str]:
        monkeypatch.setattr(target, "_processor_flags", lambda: frozenset(flags))
        return [each.name for each in target.targets()]

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    needs = {target.name: target.needs for target in TARGETS}
    avx2, avx512 = needs["avx2"], needs["avx512"]
    assert names() == []
    assert names(*avx2) == ["avx2"]
    assert names(*(avx512 - {"avx512vl"})) == ["avx2"]
    assert names(*avx512, "avx512_bf16") == ["avx512", "avx2"]
    vnni = ["avx512_vnni", "avx512", "avx2"]
    assert names(*avx512, "avx512_vnni") == vnni
    assert names(*avx512, "avx512_bf16", "avx512_vnni") == ["avx512_bf16", *vnni]
    assert names(*avx2, "avx_vnni") == ["avx2_vnni", "avx2"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert names(*avx512) == []


def test_a_library_of_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    here = library.library_path(TARGETS[0])
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    assert library.library_path(TARGETS[0]).name != here.name


def test_without_a_library_torch_serves_and_it_is_said_once(
    empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trident.kernels"):
        assert [library.operations(torch.zeros(1)) for _ in range(3)] == [None] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python -m kernels.cpu" in caplog.text


def test_a_broken_library_is_left_alone(
    empty: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "targets", lambda: list(TARGETS))
    library.library_path(TARGETS[1]).write_bytes(b"no library")
    assert library.operations(torch.zeros(1)) is None
    assert "torch's own operations serve" in caplog.text


def test_no_tensor_of_another_device_is_served() -> None:
    assert library.operations(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("/no/such/g++", "compiler /no/such/g++ was not found"),
        ("false", "failed"),
        ("g++ '", "CXX: No closing quotation"),
    ],
)
def test_what_cannot_be_built_is_said(
    empty: Path,
    compiler: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("kernels.cpu.__main__.targets", lambda: [TARGETS[0]])
    assert main() == 1
    said = capsys.readouterr().out
    assert message in said
    assert "torch's operations serve" in said
    assert list(empty.iterdir()) == []


def test_an_empty_cxx_is_none(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setattr(building.shutil, "which", lambda command: None)
    with pytest.raises(building.BuildError, match=r"compiler g\+\+ was not found"):
        building.build(TARGETS[0])


def test_an_older_library_that_another_process_removes_meanwhile_is_no_fault(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library.library_path(TARGETS[0])
    older = path.with_name(path.name[: path.name.rindex("-")] + "-0000.so")
    path.touch()
    older.touch()
    find = Path.glob

    def found(folder: Path, pattern: str) -> list[Path]:
        each = list(find(folder, pattern))
        older.unlink()
        return each

    monkeypatch.setattr(Path, "glob", found)
    building._remove_others(path, TARGETS[0])
    assert [*empty.iterdir()] == [path]


def test_what_is_there_is_not_built_again(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr("kernels.cpu.__main__.targets", lambda: [TARGETS[0]])
    library.library_path(TARGETS[0]).touch()
    assert main() == 0
    assert "up to date" in capsys.readouterr().out
