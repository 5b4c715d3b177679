"""The engine process: `python -m engine.service.process --fd N`, a child of the engine stub.

It owns the model, the KV cache and the only loop that touches them. It lives as long as the other
end of socket N: when that closes, the process exits at once, even in the middle of a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.service.process.loop import Core
from engine.service.process.openmp import set_wait
from engine.service.process.serve import configure, serve


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="connected socket to the engine stub")
    arguments = parser.parse_args()
    configure()

    def make_core(config: EngineConfig, report: Callable[[str], None]) -> Core:
        set_wait(config)
        # Imported here: it takes seconds (torch), and what fails in it is reported to the stub.
        from engine.core.engine_core import EngineCore

        return EngineCore(config, report)

    status = serve(socket.socket(fileno=arguments.fd), make_core)
    logging.shutdown()
    os._exit(status)  # without waiting for daemon threads or the teardown of torch


if __name__ == "__main__":
    main()
