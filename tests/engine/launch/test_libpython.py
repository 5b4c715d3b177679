"""Finding the shared library of the running Python."""

from pathlib import Path

import pytest

from engine.launch.errors import ServerStartError
from engine.launch.installation import python_version
from engine.launch.libpython import find_libpython, library_name
from tests.engine.launch.installations import touch


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
