"""Leader: rank 0's view of the other ranks, which it starts, sends steps to and watches."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from numpy.typing import NDArray

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.schedule import SamplingBatch, SchedulerOutput
from engine.errors import ConfigError, EngineDeadError, StepOutOfMemoryError, TridentError
from engine.execution.devices import choose_device
from engine.execution.pending_step import PendingStep, Runner
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.child_process import ChildProcess, Death
from engine.protocol.messages import EngineFailed
from engine.ranks.exchange import Exchange, ProcessRanks, allocate_exchange, join_ranks
from engine.ranks.wire import Alive, Failed, FromRank, Loaded, LoadPart, ToRank, encode_step

MODULE = "engine.service.rank"
_EXCHANGE = re.compile(r"^rank \d+ did not come|^another rank of the model")
_TICK_S = 0.5
_LOADING_TIMEOUT_S = 60.0  # without a sign of life: the import of torch holds a rank's threads


def start_core(
    config: EngineConfig,
    on_progress: Callable[[str], None] = lambda text: None,
    on_failure: Callable[[EngineFailed], None] = lambda failure: None,
) -> EngineCore:
    """Return the engine, with as many ranks as `config` asks for.

    Args:
        on_failure: called in another thread when a rank has failed after the start, once; the
            engine is of no use any more, and its next step raises `EngineDeadError`.

    Raises:
        CheckpointError, ConfigError, InsufficientMemoryError, UnsupportedError: as from
            `EngineCore`, at whichever rank.
    """
    if config.tensor_parallel_size == 1:
        return EngineCore(config, on_progress)
    leader = Leader(config, on_failure)
    try:
        core = EngineCore(config, on_progress, leader)
        leader.wait_until_loaded()
        on_progress("; ".join(leader.descriptions))
        devices = core.ready.ranks + leader.devices
        core.ready = msgspec.structs.replace(core.ready, ranks=devices)
    except Exception:
        leader.close()
        if leader.failure is not None:
            raise leader.failure from None
        raise
    weakref.finalize(core, leader.close)
    return core


class Leader:
    """The other ranks of a model, processes of this machine.

    Create it in a thread that lives as long as the engine: Linux kills a child when the thread that
    started it ends.

    Attributes:
        group: rank 0 of them.
        failure: why the ranks are of no use any more; None: they are.
    """

    def __init__(self, config: EngineConfig, on_failure: Callable[[EngineFailed], None]) -> None:
        """Start the ranks, which begin to load; arguments as `start_core`.

        Raises:
            ConfigError: a process cannot be started.
            UnsupportedError: ranks of this machine cannot share memory.
        """
        size, device = config.tensor_parallel_size, choose_device(config)
        exchange, memory = allocate_exchange(size, device)
        self.failure: TridentError | None = None
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_failed = threading.Event()
        self._group: ProcessRanks | None = None
        self._ranks = [_Rank(rank, exchange, memory) for rank in range(1, size)]
        self._waits = [0.0] * size
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=rank.name, daemon=True)
            for rank in self._ranks
        ]
        for rank, reader in zip(self._ranks, self._readers, strict=True):
            rank.channel.send(LoadPart(config.model_dump()))
            reader.start()
        threading.Thread(
            target=self._watch, args=(config.heartbeat_timeout_s,), name="ranks", daemon=True
        ).start()
        try:
            self._group = join_ranks(exchange, memory, 0, config, device)
        except RuntimeError as error:
            self.close()
            raise self.failure or ConfigError(
                f"the ranks do not find each other: {error}", param="tensor_parallel_size"
            ) from None
        finally:
            os.close(memory)

    @property
    def group(self) -> ProcessRanks:
        assert self._group is not None
        return self._group

    def lead(self, runner: Runner) -> LeadingRunner:
        """Return rank 0's `runner`, which sends its steps to the others first."""
        return LeadingRunner(runner, self)

    def take_waits(self) -> list[float]:
        """Return how many seconds each rank has waited for the others since the last call."""
        waits = [self.group.wait_seconds(), *(rank.wait_s for rank in self._ranks)]
        taken, self._waits = self._waits, waits
        return [now - before for now, before in zip(waits, taken, strict=True)]

    def send(self, schedule: SchedulerOutput) -> None:
        """Have all other ranks run a step.

        Raises:
            EngineDeadError: one has failed.
        """
        step = encode_step(schedule)
        try:
            for rank in self._ranks:
                rank.channel.send(step)
        except OSError:
            raise self._failed() from None

    def explained(self, error: RuntimeError) -> Exception:
        """Return why an exchange with the other ranks failed, or another `error` as it is."""
        text = str(error).partition("\n")[0]  # what follows is where in our C++ it was raised
        is_of_exchange = _EXCHANGE.search(text) is not None
        if is_of_exchange:  # whose cause may be known in a moment
            self._has_failed.wait(_TICK_S)
        if self.failure is not None:
            return self.failure
        return EngineDeadError(text) if is_of_exchange else error

    def wait_until_loaded(self) -> None:
        """Wait until all other ranks have their part.

        Raises:
            TridentError: one has failed.
        """
        for rank in self._ranks:
            rank.loaded.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def descriptions(self) -> list[str]:
        """What each of the other ranks has."""
        return [f"rank {rank.number}: {rank.description}" for rank in self._ranks]

    @property
    def devices(self) -> list[str]:
        """The device of each of the other ranks."""
        return [rank.device for rank in self._ranks]

    def close(self) -> None:
        """End all ranks. Repeatable."""
        self._closing.set()
        self._abort()
        for rank, reader in zip(self._ranks, self._readers, strict=True):
            rank.end()
            if reader is not threading.current_thread():
                reader.join()

    def _read(self, rank: _Rank) -> None:
        try:
            while (message := rank.channel.receive()) is not None:
                rank.num_signs += 1
                match message:
                    case Loaded(description, device):
                        rank.description, rank.device = description, device
                        rank.loaded.set()
                    case Failed(report):
                        error = TridentError.of(report)
                        if rank.loaded.is_set():
                            error = EngineDeadError(f"{rank.name} failed: {error}")
                        self._fail(error)
                    case Alive(wait_s):
                        rank.wait_s = wait_s
        except ChannelError:
            pass
        death = rank.end()
        ended = EngineDeadError(f"{rank.name} {death.reason}")
        self._fail(ended, is_own_fault=death.is_own_fault)
        rank.channel.close()

    def _watch(self, patience_s: float) -> None:
        """Find ranks that give no sign of life, in ticks: this process may be stopped itself."""
        seen = [(0, 0.0)] * len(self._ranks)
        while not self._closing.wait(_TICK_S) and self.failure is None:
            for i, rank in enumerate(self._ranks):
                num_signs, silent_s = seen[i]
                silent_s = silent_s + _TICK_S if num_signs == rank.num_signs else 0.0
                seen[i] = rank.num_signs, silent_s
                limit_s = patience_s if rank.loaded.is_set() else _LOADING_TIMEOUT_S
                if silent_s > limit_s:
                    stopped = ", stopped from outside" if rank.process.is_stopped else ""
                    text = f"hung: it gave no sign of life for {silent_s:g} s{stopped}"
                    error = EngineDeadError(f"{rank.name} {text}")
                    self._fail(error, is_own_fault=not stopped)

    def _fail(self, error: TridentError, *, is_own_fault: bool = True) -> None:
        """End all ranks because of `error`, unless they have failed or are closed already."""
        with self._lock:
            if self._closing.is_set() or self.failure is not None:
                return
            self.failure = error
            self._has_failed.set()
            has_started = all(rank.loaded.is_set() for rank in self._ranks)
        if has_started:  # before rank 0 is woken, which ends then
            self._on_failure(EngineFailed(str(error), is_own_fault))
        self._abort()
        for rank in self._ranks:
            rank.loaded.set()
            rank.process.kill()

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _failed(self) -> TridentError:
        return self.failure or EngineDeadError("another rank of the model has ended")


class LeadingRunner:
    """Rank 0's `Runner`, which sends each step to the other ranks before it runs it."""

    def __init__(self, runner: Runner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    def forward(self, schedule: SchedulerOutput) -> None:
        self._leader.send(schedule)
        with self._explained():
            self._runner.forward(schedule)

    def sample(self, sampling: SamplingBatch) -> PendingStep:
        with self._explained():
            return self._runner.sample(sampling)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StepOutOfMemoryError as error:  # the other ranks wait for this one's part
            raise EngineDeadError(f"rank 0 failed: {error}") from error
        except RuntimeError as error:
            raise self._leader.explained(error) from error

    def expert_counts(self) -> NDArray[Any] | None:
        return self._runner.expert_counts()


class _Rank:
    """The process of another rank.

    Attributes:
        process: of it.
        channel: to it.
        description, device: as it has reported.
        loaded: whether it has loaded its part, or never will.
        num_signs: messages that it has sent.
        wait_s: as it has reported.
    """

    def __init__(self, number: int, exchange: Exchange, memory: int) -> None:
        self.number = number
        self.loaded = threading.Event()
        self.description = self.device = ""
        self.num_signs = 0
        self.wait_s = 0.0
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", MODULE),
                        *("--fd", str(theirs.fileno())),
                        *("--exchange", exchange, "--memory", str(memory)),
                        *("--rank", str(number)),
                    ],
                    pass_fds=[theirs.fileno(), memory],
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"a rank cannot be started: {error.strerror}", param="tensor_parallel_size"
                ) from None
        self.process = ChildProcess(process)
        self.channel: Channel[ToRank, FromRank] = Channel(ours, FromRank)

    @property
    def name(self) -> str:
        """What errors call it: of several GPUs, which one too."""
        device = f", {self.device}" if self.device.startswith("cuda") else ""
        return f"rank {self.number} (process {self.process.pid}{device})"

    def end(self) -> Death:
        """Make sure that the process has ended; return how."""
        self.channel.shutdown()
        return self.process.end() or Death("cannot be killed", is_own_fault=True)
