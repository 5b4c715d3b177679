"""Which code the engine process runs."""

import sys
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.service.stub.engine_process import EngineProcess
from tests.engine.service.stub import fake_engine


def test_a_package_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be started in any folder, such as that of another checkout."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('of another checkout')\n")
    monkeypatch.chdir(tmp_path)
    process = EngineProcess(sys.executable, fake_engine.__name__)
    try:
        assert process.start(EngineConfig(), lambda text: None).description == "a fake"
    finally:
        process.shut_down()
