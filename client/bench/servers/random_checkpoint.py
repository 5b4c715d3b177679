"""The random checkpoints of `trident bench`, created once and cached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from client.bench.errors import BenchError
from engine.service.stub.environment import engine_environment


def random_checkpoint(size: str, console: Console) -> Path:
    """Return the folder of the seeded random checkpoint of `size`, creating it if needed.

    Raises:
        BenchError: there is no such size, or it could not be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trident" / "checkpoints" / f"random-{size}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    module = "engine.demo.random_checkpoint"
    command = [sys.executable, "-P", "-m", module, size, str(unfinished)]
    try:
        with console.status(f"writing a random checkpoint to {folder}", spinner="line"):
            # In a separate process, so that this one does not import torch.
            env = engine_environment(os.environ)
            subprocess.run(
                command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
            )
        if not folder.is_dir():  # unless another process was faster
            unfinished.rename(folder)
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode().strip().splitlines() or [f"status {error.returncode}"]
        raise BenchError(f"no random checkpoint {size} in {folder.parent}: {words[-1]}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
