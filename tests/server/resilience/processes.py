"""Resources of a running server on its machine, and what is left of them later."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_ENGINE_MODULE = "engine.service.process"
_STUB = "triton_python_backend_stub"
STAGES = ("tokenizer", "engine", "detokenizer", "tensorrt_llm_bls")


@dataclass(frozen=True)
class Tree:
    """The processes of one server, looked up at each call.

    Attributes:
        head: tritonserver itself.
    """

    head: psutil.Process

    @classmethod
    def of(cls, pid: int) -> Tree:
        """Return the tree below the tritonserver with this process id."""
        return cls(psutil.Process(pid))

    def members(self) -> dict[str, psutil.Process]:
        """Return the processes alive now by role: tritonserver, a stage each, engine process."""
        named = {"tritonserver": self.head}
        for process in self.head.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if role := _role(process.cmdline()):
                    named[role] = process
        return named

    def engine_process(self) -> psutil.Process | None:
        """Return the process that owns the model; None if there is none."""
        return self.members().get("engine process")

    def footprint(self) -> Footprint:
        """Return all resources that the server uses now."""
        processes = [self.head, *self.head.children(recursive=True)]
        return Footprint(
            frozenset(processes),
            frozenset(region for p in processes for region in _regions(p)),
            frozenset(_unix_sockets(processes)),
            frozenset(_ports(processes)),
        )


@dataclass(frozen=True)
class Footprint:
    """Processes, regions in /dev/shm, names of unix sockets and listening TCP ports."""

    processes: frozenset[psutil.Process] = frozenset()
    regions: frozenset[Path] = frozenset()
    sockets: frozenset[str] = frozenset()
    ports: frozenset[int] = frozenset()

    def __or__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.processes | other.processes,
            self.regions | other.regions,
            self.sockets | other.sockets,
            self.ports | other.ports,
        )

    def remains(self) -> list[str]:
        """Describe what still exists of it."""
        alive = [p for p in self.processes if is_alive(p)]
        names = {name for name, _ in _named_unix_sockets()}
        listening = _ports_listened_on()
        return [
            *(f"process {p.pid} ({_describe(p)})" for p in alive),
            *(f"shared memory {r}" for r in sorted(self.regions) if r.exists()),
            *(f"unix socket {name}" for name in sorted(self.sockets & names)),
            *(f"port {port}" for port in sorted(self.ports & listening)),
        ]


def shared_memory_bytes(process: psutil.Process) -> int:
    """Return the size of a stub's regions in /dev/shm."""
    sizes = 0
    for region in _regions(process):
        with contextlib.suppress(FileNotFoundError):
            sizes += region.stat().st_size
    return sizes


def _role(cmdline: list[str]) -> str:
    if _ENGINE_MODULE in cmdline:
        return "engine process"
    if cmdline and Path(cmdline[0]).name == _STUB:
        return next((name for name in STAGES if Path(cmdline[1]).parts[-3] == name), "")
    return ""


def _regions(process: psutil.Process) -> Iterator[Path]:
    """Yield the regions in the command line of a stub."""
    with contextlib.suppress(psutil.Error):
        cmdline = process.cmdline()
        if cmdline and Path(cmdline[0]).name == _STUB:
            yield _SHARED_MEMORY / cmdline[2]


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` runs; a zombie does not."""
    try:  # is_running detects a reused process id
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.status()}: {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return "gone meanwhile"


def _unix_sockets(processes: Iterable[psutil.Process]) -> Iterator[str]:
    """Yield the names of the unix sockets that `processes` hold open."""
    inodes: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.update(re.findall(r"^socket:\[(\d+)\]$", str(descriptor.readlink())))
    yield from (name for name, inode in _named_unix_sockets() if inode in inodes)


def _named_unix_sockets() -> Iterator[tuple[str, str]]:
    """Yield (name, inode) of each named unix socket; abstract names begin with @."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield fields[7], fields[6]


def _ports(processes: Iterable[psutil.Process]) -> Iterator[int]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    yield connection.laddr.port


def _ports_listened_on() -> set[int]:
    connections = psutil.net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr}
