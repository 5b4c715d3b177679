from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from tests.factories.cores import MakeCore


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def make_core(checkpoint: Path, request: pytest.FixtureRequest) -> MakeCore:
    fields = {"model": str(checkpoint), "dtype": "float32", "async_scheduling": request.param}
    return lambda **settings: EngineCore(EngineConfig.parse({**fields, **settings}))
