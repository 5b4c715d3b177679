"""What keeps the server from starting is said in one line of its log, and it exits."""

import shutil
from pathlib import Path

import pytest

from engine.launch.errors import ServerStartError
from engine.launch.server import TritonServer
from tests.factories.pickles import replace_weights_by_a_pickle

pytestmark = pytest.mark.server


def failure(server: TritonServer) -> str:
    """Start `server`, which fails; return its log."""
    with pytest.raises(ServerStartError):
        server.start()
    assert "failed to load" in server.log
    return server.log


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        pytest.param(
            *("TRIDENT_MAX_NUM_SEQS", "many", "max_num_seqs: Input should be a valid integer"),
            marks=pytest.mark.large,
        ),
        ("TRIDENT_MODEL", "/no/such/folder", "model: there is no folder /no/such/folder"),
    ],
)
def test_a_wrong_setting(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TritonServer({}, ports=0)
    # After the launcher has checked the settings: as if tritonserver was started without it.
    monkeypatch.setenv(variable, value)
    assert message in failure(server)


def test_a_checkpoint_whose_weights_are_a_pickle(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    replace_weights_by_a_pickle(broken, mark)
    log = failure(TritonServer({"model": str(broken)}, ports=0))
    assert "pickled weights (pytorch_model.bin)" in log
    assert not mark.exists()


@pytest.mark.large
def test_a_checkpoint_without_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").unlink()
    assert "safetensors" in failure(TritonServer({"model": str(broken)}, ports=0))
