"""Ends all processes of a server, removes what tritonserver leaves, defers signals meanwhile."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from engine.launch.environment import RUN_ID

_ENVIRONMENTS = Path("/tmp")  # whatever TMPDIR is
_STARTING_S = 10.0


def kill_all(run_id: str) -> None:
    """Kill all processes with `run_id` in their environment and wait until they are gone.

    Process groups and parents do not cover all of them: a child may have started a session of its
    own, and an orphan belongs to init. Another may start while these are listed.
    """
    while processes := list(_of_run(run_id)):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(processes, timeout=5)
        if alive:
            return


def _of_run(run_id: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ID) == run_id:
                yield process


def remove_environment(started: float) -> None:
    """Delete the empty folder that a killed tritonserver left in /tmp.

    It creates one for Python environments soon after its start, under a random name. If another
    tritonserver was started at about that time, the folder may belong to it and stays.

    Args:
        started: when it was started, in seconds since the epoch.
    """
    running = psutil.process_iter(["name", "create_time"])
    others = [p.info["create_time"] for p in running if p.info["name"] == "tritonserver"]
    if any(abs(other - started) < _STARTING_S for other in others):
        return
    for path in _ENVIRONMENTS.glob("python_env_*"):
        with contextlib.suppress(OSError):  # not ours, or not empty
            if started <= path.stat().st_ctime < started + _STARTING_S:
                path.rmdir()


@contextlib.contextmanager
def uninterrupted(*, later: bool = False) -> Iterator[None]:
    """Keep SIGINT, SIGTERM and SIGHUP out of the block, so that clean-up completes.

    Args:
        later: raise the first that came at the end of the block; else they are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if later and came:
        signal.raise_signal(came[0])
