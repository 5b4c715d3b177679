"""Finds the process that owns the model."""

import psutil

from engine.launch.server import TritonServer


def engine_process(server: TritonServer) -> psutil.Process:
    """Return the engine process below the server's tritonserver; there must be one."""
    (process,) = (
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "engine.service.process" in child.cmdline()
    )
    return process
