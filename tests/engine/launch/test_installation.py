"""Finding a tritonserver and a libpython that fit the running Python."""

from pathlib import Path

import pytest

from engine.launch import installation
from engine.launch.errors import ServerStartError
from engine.launch.installation import (
    WHEEL,
    find_tritonserver,
    from_release,
    from_wheel,
    python_version,
)
from engine.launch.libpython import find_libpython, library_name
from tests.engine.launch.installations import (
    OTHER_VERSION,
    installation_of,
    make_release,
    make_wheel,
    touch,
)


def test_release_with_its_own_backends(tmp_path: Path) -> None:
    binary = make_release(tmp_path, python_version())
    found = find_tritonserver([installation_of(from_release(binary))])
    assert found.binary == binary
    assert found.backend_directory == tmp_path / "backends"


def test_release_for_another_python_gives_way_to_the_wheel(tmp_path: Path) -> None:
    release = from_release(make_release(tmp_path / "opt", OTHER_VERSION))
    wheel = from_wheel(make_wheel(tmp_path / "site", (OTHER_VERSION, python_version())))
    found = find_tritonserver([installation_of(release), installation_of(wheel)])
    assert found == wheel
    assert found.backend_directory is None
    assert found.libraries == (tmp_path / "site" / "nvidia_pytriton.libs",)


def test_no_stub_for_this_python(tmp_path: Path) -> None:
    wheel = from_wheel(make_wheel(tmp_path, ("3.10", "3.9", OTHER_VERSION)))
    with pytest.raises(ServerStartError, match=r"stubs for 3\.8, 3\.9, 3\.10 only") as caught:
        find_tritonserver([installation_of(wheel)])
    assert python_version() in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="not found") as caught:
        find_tritonserver([])
    assert "make install" in caught.value.hint
    assert f"pip install {WHEEL}" in caught.value.hint


def test_no_wheel_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "machine_problem", lambda: "another processor")
    with pytest.raises(ServerStartError, match="not found") as caught:
        find_tritonserver([])
    assert caught.value.hint == "another processor; use NVIDIA's container: docker/README.md"


def test_incomplete_trees_are_none(tmp_path: Path) -> None:
    assert from_release(tmp_path / "bin" / "tritonserver") is None
    assert from_wheel(tmp_path) is None
    assert installation_of(from_release(make_release(tmp_path, None))).stubs == {}


def test_first_folder_that_has_it(tmp_path: Path) -> None:
    touch(tmp_path / "b" / library_name())
    touch(tmp_path / "c" / library_name())
    found = find_libpython([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert found == tmp_path / "b" / library_name()


def test_missing_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=library_name()) as caught:
        find_libpython([tmp_path])
    assert f"libpython{python_version()}" in caught.value.hint
    assert "uv venv" in caught.value.hint
    assert "conda" in caught.value.hint
