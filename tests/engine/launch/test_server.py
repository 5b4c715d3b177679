"""TritonServer, as far as it goes without a tritonserver."""

from pathlib import Path

import pytest

from engine.launch import run_directory, server
from engine.launch.errors import ServerStartError
from engine.launch.installation import from_release, python_version
from tests.engine.launch.installations import installation_of, make_release, touch


def test_what_is_missing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise ServerStartError("libpython is missing", "install it")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_directory, "find_libpython", missing)
    release = installation_of(from_release(make_release(tmp_path / "opt", python_version())))
    monkeypatch.setattr(server, "find_tritonserver", lambda: release)
    touch(tmp_path / "repository" / "ensemble" / "config.pbtxt")
    triton = server.TritonServer({}, repository=tmp_path / "repository", ports=0)
    with pytest.raises(ServerStartError, match="libpython is missing"):
        triton.start()
    assert not list(tmp_path.glob("trident-*"))


@pytest.mark.parametrize("file", ["config.json", "other/config.pbtxt"])
def test_a_repository_without_the_model_is_refused(tmp_path: Path, file: str) -> None:
    """Triton would start and be ready, without it."""
    touch(tmp_path / file)
    with pytest.raises(ServerStartError, match="has no model ensemble") as refused:
        server.TritonServer({}, repository=tmp_path, ports=0).prepare()
    assert "a checkpoint goes with --model" in refused.value.hint
    model = {"served_model_name": "other"}
    if file.startswith("other"):
        server.TritonServer(model, repository=tmp_path, ports=0).prepare()
    explicit = ["--model-control-mode=explicit"]
    server.TritonServer({}, arguments=explicit, repository=tmp_path, ports=0).prepare()
