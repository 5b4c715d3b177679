"""The engine alone as a measured server: in a load generator's process, without Triton."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from client.bench.errors import BenchError
from client.bench.load.generators import end_worker, start_worker
from client.bench.load.record import Target
from client.bench.servers.server import Server
from engine.launch.environment import interpreter_folder, server_environment
from engine.launch.installation import find_tritonserver
from engine.launch.server import TritonServer
from engine.service.stub.environment import engine_environment


class EngineAlone(Server):
    """The engine with the settings, interpreter and variables that it has in the server.

    Args:
        settings: override those of `engine.json` and the `TRIDENT_*` variables.

    Raises:
        ServerStartError: as `TritonServer`.
    """

    def __init__(self, model: Path, settings: Mapping[str, str], *, name: str) -> None:
        self.name = name
        config = TritonServer({**settings, "model": str(model)}, ports=0).config
        self._target = Target("engine", "", str(model), settings=config.model_dump(mode="json"))
        libraries = find_tritonserver().libraries
        self._environment = engine_environment(
            server_environment(os.environ, run_id="bench", libraries=libraries, settings={})
        )

    @property
    def pids(self) -> list[int]:
        """As `Server.pids`."""
        assert self.worker is not None
        return [self.worker.pid]

    @property
    def target(self) -> Target:
        """As `Server.target`."""
        return self._target

    def require_alive(self) -> None:
        """As `Server.require_alive`."""
        assert self.worker is not None
        if (status := self.worker.poll()) is not None:
            raise BenchError(f"the engine alone ended with status {status}; see above")

    def __enter__(self) -> Self:
        self.launched = time.monotonic()
        self.worker = start_worker(str(interpreter_folder() / "python3"), self._environment)
        return self

    def __exit__(self, *raised: object) -> None:
        assert self.worker is not None
        end_worker(self.worker)
