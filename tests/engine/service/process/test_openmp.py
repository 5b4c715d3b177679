import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.demo import CHECKPOINT_DIR
from engine.service.process.openmp import set_wait

_START = """
import sys
from engine.config.engine_config import EngineConfig
from engine.service.process import __main__
from engine.service.process.openmp import set_wait
assert "torch" not in sys.modules
set_wait(EngineConfig())
import torch
"""


def test_openmp_starts_with_the_wait_of_the_model() -> None:
    environ = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environ.pop(name, None)
    started = subprocess.run(
        [sys.executable, "-c", _START], env=environ, capture_output=True, text=True, check=True
    )
    assert "GOMP_SPINCOUNT = '1000'" in started.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in started.stderr


@pytest.mark.parametrize(("hidden_size", "iterations"), [(256, "1000"), (896, "10000")])
def test_threads_wait_longer_for_a_wider_model(
    tmp_path: Path, hidden_size: int, iterations: str
) -> None:
    fields = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "hidden_size": hidden_size}))
    environ: dict[str, str] = {}
    set_wait(EngineConfig(model=str(tmp_path)), environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": iterations}


def test_variables_of_the_user_stay() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}
    set_wait(EngineConfig(), environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}
