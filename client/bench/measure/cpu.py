"""CPU time of each process of a server, and of the load generator; memory."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from client.bench.errors import BenchError
from engine.launch import child, worker_process

CLIENT = "load generator"
OTHERS = "all else on these cores"
STOLEN = "taken by the host"
NOT_OURS = (OTHERS, STOLEN)
_STUB = "triton_python_backend_stub"


class CpuMeter:
    """CPU seconds by process, user and system, since it was made.

    The stages' stubs are distinguished by model; instances of one model are summed. Other programs'
    time counts only the cores that this process may use; time stolen by a virtual machine's host is
    separate. The resolution is that of the kernel's counters, usually 10 ms.
    """

    def __init__(self, *servers: int, clients: Sequence[int]) -> None:
        """Measure the servers of these pids, and the load generator's."""
        self._servers = [psutil.Process(pid) for pid in servers]
        self._clients = [psutil.Process(pid) for pid in clients]
        self._before = self._now()

    def used(self) -> dict[str, float]:
        """Return the seconds so far by process, with those of `OTHERS` and `STOLEN`."""
        now = self._now()
        used = {name: max(0.0, now[name] - self._before.get(name, 0.0)) for name in now}
        own = sum(seconds for name, seconds in used.items() if name not in NOT_OURS)
        used[OTHERS] = max(0.0, used[OTHERS] - own)
        return used

    def _now(self) -> dict[str, float]:
        """Return the counters; `OTHERS` still includes all programs."""
        seconds: dict[str, float] = defaultdict(float)
        for server in self._servers:
            for process in [server, *server.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = process.cpu_times()
                    name = process_name(process.name(), process.cmdline())
                    seconds[name] += used.user + used.system
        for client in self._clients:
            own = client.cpu_times()
            seconds[CLIENT] += own.user + own.system
        cores = os.sched_getaffinity(0)
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in cores:
                stolen = getattr(times, "steal", 0.0)
                idle = times.idle + getattr(times, "iowait", 0.0)
                guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
                seconds[STOLEN] += stolen
                seconds[OTHERS] += sum(times) - idle - stolen - guest  # guest is included in user
        return seconds


def process_name(name: str, command: list[str]) -> str:
    """Return the name shown in tables of a server process, from its name and command line."""
    if name.startswith(_STUB[:15]) and len(command) > 1:  # names are cut to 15 characters
        return f"{Path(command[1]).parents[1].name} stub"
    if "engine.service.process" in command:
        return "engine process"
    if worker_process.__name__ in command:
        return "engine alone"
    if child.__file__ in command:
        return "watcher"
    if "client.gateway.processes.worker" in command or "client.cli gateway" in " ".join(command):
        return "gateway"
    return name


def tree_memory(pid: int) -> int:
    """Return the bytes used by a process and its descendants, shared pages divided (PSS).

    Raises:
        BenchError: one belongs to another user and cannot be inspected.
    """
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            raise BenchError(
                f"the memory of process {process.pid} of the server cannot be read: it is "
                "another user's"
            ) from None
    return total
