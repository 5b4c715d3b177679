"""One worker of a gateway: the process that `Workers` starts, and that ends with it.

    python -m client.gateway.processes.worker HOST PORT FOLDER

All of them listen at HOST and PORT, and share FOLDER. The settings come on standard input, which
the supervisor keeps open as long as it lives.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

from client.gateway.processes.server import BACKLOG, configure_logging, make_server, run
from client.gateway.settings import SETTINGS


def main(host: str, port: int, folder: Path) -> None:
    """Serve until SIGTERM or SIGINT, or until the supervisor is gone."""
    # Until the server takes it: Ctrl-C is for the supervisor, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = SETTINGS.validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_follow_supervisor, args=(folder,), daemon=True).start()
    configure_logging()
    server = make_server(settings, shared=folder)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The kernel spreads connections over the sockets of a port. From one socket for all, the worker
    # that wakes first would take most of those that come at once.
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
    run(server, [listener])


def _follow_supervisor(folder: Path) -> None:
    """End this process when the supervisor has been killed, and remove what it could not."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
