"""EngineAlone: the engine in its own process, as in the server, but without Triton."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from client import SamplingOptions
from client.bench.errors import BenchError
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave
from engine.config import EngineConfig
from engine.launch.environment import interpreter_folder, server_environment
from engine.launch.installation import find_tritonserver
from engine.service.stub.environment import engine_environment

ENGINE = "engine process"


class EngineAlone:
    """A context manager: inside the block the engine is loaded and accepts waves of requests.

    It uses the interpreter and environment variables of the server's engine process, without
    Triton, the stub and the socket between the two.

    Raises:
        BenchError: the engine does not start, or died.
        ServerStartError: as `TritonServer`.
    """

    def __init__(self, config: EngineConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._config = config
        libraries = find_tritonserver().libraries
        self._environment = engine_environment(
            server_environment(environ, run_id="bench", libraries=libraries, settings={})
        )
        self._process: subprocess.Popen[str] | None = None

    def run(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Wave:
        """Complete `prompts`, all submitted at once in this order."""
        answer = self._ask(
            {"prompts": [prompt.token_ids for prompt in prompts], "sampling": sampling}
        )
        return Wave(
            streams=len(prompts),
            num_tokens=answer["num_tokens"],
            seconds=answer["seconds"],
            cpu_seconds={ENGINE: answer["cpu_seconds"]},
        )

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [str(interpreter_folder() / "python3"), "-P", "-m", "client.bench.engine_worker"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to this process, which ends the worker
        )
        try:
            self._ask(self._config.model_dump(mode="json"))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _ask(self, fields: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer is reported below
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise BenchError(f"the engine alone ended with status {status}; see above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"the engine alone cannot start: {answer['error']}")
        return answer

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()  # nothing to save
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
