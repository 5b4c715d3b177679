"""TritonServer: one real tritonserver on Trident's model repository, from start to clean end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from engine.checkpoint.hub import resolve_checkpoint, resolve_tokenizer
from engine.errors import CheckpointError
from engine.launch import arguments as flags
from engine.launch import child, security, server_log
from engine.launch.environment import effective_config, server_environment, settings_variables
from engine.launch.errors import ServerStartError
from engine.launch.gpu import has_gpu
from engine.launch.installation import find_tritonserver, model_repository
from engine.launch.log_file import LogFile
from engine.launch.model_configs import ENSEMBLE
from engine.launch.ports import Endpoint, require_free
from engine.launch.processes import kill_all, remove_environment, uninterrupted
from engine.launch.readiness import answers, require_model
from engine.launch.run_directory import RunDirectory, is_plain
from engine.launch.stage_watch import StageWatch
from engine.restart_delay import RestartDelay

# tritonserver 2.51 puts HTTP bodies on the stack (8 MB crash at 7.5 MB), and reads nested JSON by
# recursion: up to 136 bytes of stack for each byte of a body, so 1.1 GiB for one of 8 MiB, the
# limit of docker/nginx.conf. Only what a thread has used of it is memory.
_STACK_BYTES = 1280 << 20
_UNLOADING_S = 5  # that tritonserver may take to end when its requests have
_KILL_LOADING_AFTER_S = 1  # tritonserver ignores signals until its models are loaded
_CRASHING_S = 5  # that it needs at most to write its stack to the log
_KILLED_S = 10  # that it needs at most to end: inside the kernel it may take for ever
_POLL_S = 0.1

OnLine = Callable[[str], None]
Check = Callable[[], None]


class TritonServer:
    """A tritonserver process of our own; as a context manager it is ready inside the block.

        with TritonServer({"max_num_seqs": 8}, ports=0) as server:
            TridentClient(server.grpc_url).generate("Hello")

    Start it from the main thread: Linux ends the server when the thread that started it ends.

    Args:
        settings: fields of EngineConfig that override `engine.json` and the environment.
        arguments: further flags for tritonserver, verbatim.
        repository: another model repository than Trident's own.
        host: the address that each service listens on that `arguments` give none; 0.0.0.0 is all.
        ports: 0 chooses a free port for each service that `arguments` give no port.
        environ: the environment to start from.
        start_timeout_s: how long loading may take; None waits as long as the server lives.
        on_line: called with each new line of the server's log, while waiting and in `follow`.

    Attributes:
        config: the settings that the engine runs with.
        model: the name of the model that clients call.
        endpoints: `http`, `grpc` and `metrics`, without those that are switched off.
        administration_open: whether the administrative endpoints can be used, with the key.
        tls: whether the gRPC service is encrypted.
        wants_certificates: whether it takes only clients with a certificate.
        exit_timeout_s: seconds that requests in flight have when it is stopped.

    Raises:
        ServerStartError: at construction for a wrong setting or flag, in `start` for what is
            missing on this machine or fails while loading.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] = {},
        *,
        arguments: Sequence[str] = (),
        repository: Path | None = None,
        host: str = flags.DEFAULT_HOST,
        ports: int | None = None,
        environ: Mapping[str, str] = os.environ,
        start_timeout_s: float | None = None,
        on_line: OnLine = lambda line: None,
    ) -> None:
        self._repository = (repository or model_repository()).resolve()
        self._settings = settings_variables(settings)
        self._environ = environ
        self.config = effective_config(self._repository, {**environ, **self._settings})
        self.model = self.config.served_model_name or ENSEMBLE
        flags.check(arguments)
        self.endpoints, filled = flags.endpoints(arguments, ports, host)
        self.administration_open = security.is_administration_open(arguments, environ)
        self._arguments = security.secured(filled, environ)
        self.tls = security.has_tls(self._arguments)
        self.wants_certificates = security.wants_certificates(self._arguments)
        self.exit_timeout_s = flags.exit_timeout(arguments)
        self._start_timeout_s = start_timeout_s
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._run: RunDirectory | None = None
        self._log = ""
        self._log_file: LogFile | None = None
        self._started = 0.0  # seconds since the epoch
        self._prepared = self._ready = self._failed = False
        self._delay = RestartDelay()
        self._crashed_at: float | None = None

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC service."""
        return self._endpoint("grpc").url

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP service."""
        return self._endpoint("http").url

    @property
    def metrics_url(self) -> str:
        """`host:port` of the Prometheus service."""
        return self._endpoint("metrics").url

    @property
    def log(self) -> str:
        """What the server has said since it was started, its last 4 MiB at most."""
        if self._run is not None and self._log_file is not None:
            self._log = self._log_file.tail()
        return self._log

    @property
    def log_path(self) -> Path:
        """The file that the server logs to. After `stop` it is there if the server failed."""
        assert self._log_file is not None, "the server has not been started"
        return self._log_file.path

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def prepare(self) -> None:
        """Do what comes before starting: check the ports, and fetch a model from the hub.

        A download shows a progress bar. `start` does this if it has not been done.

        Raises:
            ServerStartError: a port is taken, or the model cannot be found or downloaded.
        """
        require_model(self._repository, self.model, self._arguments)
        require_free(self.endpoints.values())
        try:
            checkpoint = resolve_checkpoint(
                self.config.model, weights=self.config.load_format != "dummy"
            )
            resolve_tokenizer(self.config.tokenizer, checkpoint)
        except CheckpointError as error:
            raise ServerStartError(str(error)) from None
        self._prepared = True

    def start(self) -> None:
        """Start the server and return when it answers requests.

        Raises:
            ServerStartError: it cannot be started, for the reason in its text; the hint is the next
                step.
        """
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the server's process; raises as `start`. On errors nothing is left."""
        assert self._process is None, "the server has been started already"
        if not self._prepared:
            self.prepare()
        with self._stopped_on_errors():
            self._run = RunDirectory()
            self._log_file = LogFile(self._run.path.name)
            self._spawn(self._run, self._log_file)

    def _spawn(self, run: RunDirectory, log_file: LogFile) -> None:
        command, environment = self._command(run)
        self._started, self._crashed_at = time.time(), None
        patience_s = self.exit_timeout_s + _UNLOADING_S
        with log_file.open() as log:
            self._process = subprocess.Popen(
                child.tied(command, patience_s, _STACK_BYTES),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(run.lock,),
                # Ctrl-C in the terminal is for the launcher, which then stops the server.
                start_new_session=True,
            )

    def wait_until_ready(self, check: Check = lambda: None) -> None:
        """Return when the launched server answers; what `check` raises ends it, as errors do."""
        with self._stopped_on_errors():
            self._await(check)

    def _await(self, check: Check) -> None:
        assert self._process is not None
        deadline = time.monotonic() + (self._start_timeout_s or float("inf"))
        while not answers(self.endpoints, self.model, self._arguments, self.log):
            self._report()
            if self._process.poll() is not None:
                self._report()
                raise ServerStartError(*server_log.failure(self.log), self.log_path)
            check()
            if time.monotonic() > deadline:
                last = (self.log.strip().splitlines() or ["nothing"])[-1]
                reason = f"the server was not ready after {self._start_timeout_s:g} s"
                raise ServerStartError(reason, f"last log line: {last}", self.log_path)
            time.sleep(_POLL_S)
        self._ready = True
        self._report()

    def keep_running(self, check: Check = lambda: None) -> NoReturn:
        """Hand log lines to `on_line`, and start the server again whenever it has died.

        It has the same ports and the same log then. `check` is called now and then; what it raises
        ends this, as a signal does.
        """
        while True:
            self._start_again(self.follow(check), check)

    def _start_again(self, why: str, check: Check) -> None:
        is_up = False
        while not is_up:
            delay_s = self._delay.next()
            self.note(f"{why}; starting it again in {delay_s:g} s")
            with uninterrupted(later=True):
                self._clear(has_failed=True)
            self._wait(delay_s, check)
            try:
                self._run = RunDirectory()
                assert self._log_file is not None
                self._spawn(self._run, self._log_file)
                self._await(check)
                is_up = True
            except (ServerStartError, OSError) as error:  # OSError: no memory, a full disk
                why = f"tritonserver could not be started again: {error}"
        self.note("tritonserver is ready again", "INFO")

    def follow(self, check: Check = lambda: None) -> str:
        """Hand log lines to `on_line` until the server cannot serve any more; return why.

        What `check`, which is called now and then, raises ends this too.
        """
        assert self._process is not None, "the server has not been started"
        # With another control mode, unloading a model ends its stage, which is no failure.
        fixed = flags.value_of(self._arguments, "--model-control-mode") in (None, "none")
        watch = StageWatch(self._process.pid) if fixed else None
        while (status := self._process.poll()) is None:
            self._report()
            check()
            if watch is not None and (lost := watch.lost()) and self._process.poll() is None:
                self._failed, self._ready = True, False  # what is in flight will never end
                return f"the {lost} stage of tritonserver has died"
            if self._crashed_at is not None and time.monotonic() - self._crashed_at > _CRASHING_S:
                self._failed, self._ready = True, False
                return "tritonserver has crashed, and hangs"
            time.sleep(_POLL_S)
        self._report()
        return server_log.death(status, self.log)

    def note(self, text: str, level: str = "WARNING") -> None:
        """Write a line of the launcher's own to the server's log, from where it is reported."""
        assert self._log_file is not None, "the server has not been started"
        self._log_file.write(server_log.launcher_line(text, level, self.config.log_format))

    def stop(self) -> None:
        """End it; remove all it left, but the log of one that failed. Repeatable, uninterrupted."""
        with uninterrupted():
            has_run = self._run is not None
            self._clear(has_failed=self._process is not None and self._process.poll() is not None)
            if has_run and self._log_file is not None and not self._failed:
                self._log_file.remove()
            self._prepared = self._failed = False

    def _clear(self, *, has_failed: bool) -> None:
        """End the server, at once if it `has_failed`, and remove all it left, but the log."""
        self._failed |= has_failed
        if self._process is not None:
            if has_failed:
                self._process.kill()
            else:
                self._process.terminate()
            try:
                self._process.wait(
                    self.exit_timeout_s + _UNLOADING_S if self._ready else _KILL_LOADING_AFTER_S
                )
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILLED_S)
        if self._run is not None:
            kill_all(self._run.path.name)
            _ = self.log  # reads it a last time: nobody writes to it any more
            self._run.remove()
            self._run = None
        if self._process is not None and self._process.returncode != 0:
            remove_environment(self._started)
        self._process = None
        self._ready = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _endpoint(self, name: str) -> Endpoint:
        assert name in self.endpoints, f"the {name} service is switched off"
        return self.endpoints[name]

    def _command(self, run: RunDirectory) -> tuple[list[str], dict[str, str]]:
        """Return tritonserver's command line and environment."""
        installation = find_tritonserver()
        environment = server_environment(
            self._environ,
            run_id=run.path.name,
            libraries=(*installation.libraries, run.add_libpython()),
            settings=self._settings,
        )
        repository = self._repository
        if self.model != ENSEMBLE or not is_plain(repository):
            repository = run.add_repository(repository, self.model)
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={run.add_backends(installation)}",
            f"--backend-config=python,shm-region-prefix-name={run.shared_memory_prefix}",
            f"{flags.EXIT_TIMEOUT}={self.exit_timeout_s}",
            *flags.DEFAULTS,
            *(() if has_gpu() else flags.WITHOUT_GPU),
            *self._arguments,
        ]
        if self._repository == model_repository().resolve():
            # Ours is complete. To ask what to add, Triton would start each stage twice.
            command.append("--disable-auto-complete-config")
        return command, environment

    def _wait(self, seconds: float, check: Check) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._report()
            check()
            time.sleep(min(_POLL_S, seconds))

    def _report(self) -> None:
        assert self._log_file is not None
        for line in self._log_file.lines():
            if server_log.tells_of_success(line):
                self._delay.succeeded()
            elif server_log.tells_of_crash(line):
                self._crashed_at = time.monotonic()
            self._on_line(line)

    @contextmanager
    def _stopped_on_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed = isinstance(error, ServerStartError)
            self.stop()
            raise
