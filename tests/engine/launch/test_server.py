"""TritonServer, as far as it goes without a tritonserver."""

from pathlib import Path

import pytest

from engine.launch import run_directory, server
from engine.launch.errors import ServerStartError
from engine.launch.installation import from_release, python_version
from tests.engine.launch.installations import installation_of, make_release


def test_what_is_missing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise ServerStartError("libpython is missing", "install it")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_directory, "find_libpython", missing)
    release = installation_of(from_release(make_release(tmp_path / "opt", python_version())))
    monkeypatch.setattr(server, "find_tritonserver", lambda: release)
    (tmp_path / "repository").mkdir()
    triton = server.TritonServer({}, repository=tmp_path / "repository", ports=0)
    with pytest.raises(ServerStartError, match="libpython is missing"):
        triton.start()
    assert not list(tmp_path.glob("trident-*"))
