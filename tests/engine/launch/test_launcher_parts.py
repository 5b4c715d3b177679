"""Finding tritonserver, preparing its directory and environment, reading its log."""

import fcntl
import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from client.commands.serve import own_name
from client.commands.server_display import ServerLog
from engine.launch import installation, processes, run_directory, server, server_log
from engine.launch.environment import (
    RUN_ID,
    effective_config,
    interpreter_folder,
    server_environment,
    settings_variables,
)
from engine.launch.errors import ServerStartError
from engine.launch.installation import (
    STUB,
    WHEEL,
    Installation,
    find_tritonserver,
    from_release,
    from_wheel,
    python_version,
)
from engine.launch.libpython import find_libpython, library_name
from engine.launch.ports import Endpoint, pick_free, require_free
from engine.launch.processes import kill_all
from engine.launch.run_directory import RunDirectory, remove_stale

OTHER_VERSION = "3.8"


def test_the_ensemble_is_served_under_another_name(tmp_path: Path) -> None:
    for model in ("ensemble", "engine"):
        _touch(tmp_path / model / "config.pbtxt")
    _touch(tmp_path / "README.md")
    run = RunDirectory()
    repository = run.add_repository(tmp_path, "vllm_model")
    assert {p.name: p.resolve() for p in repository.iterdir()} == {
        "vllm_model": tmp_path / "ensemble",
        "engine": tmp_path / "engine",
    }
    run.remove()
    assert (tmp_path / "ensemble" / "config.pbtxt").is_file()


def _touch(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _release(root: Path, version: str | None) -> Path:
    """Make a tree as in NGC's container; return the binary."""
    _touch(root / "backends" / "python" / "libtriton_python.so")
    if version is not None:
        content = b"\x7fELF..libpython" + version.encode() + b".so.1.0\0.."
        _touch(root / "backends" / "python" / STUB, content)
    return _touch(root / "bin" / "tritonserver")


def _wheel(packages: Path, versions: tuple[str, ...]) -> Path:
    root = packages / "pytriton" / "tritonserver"
    _touch(root / "bin" / "tritonserver")
    _touch(root / "backends" / "python" / "libtriton_python.so")
    _touch(root / "backends" / "python" / "__pycache__" / "a.pyc")
    for version in versions:
        _touch(root / "python_backend_stubs" / version / STUB).chmod(0o644)
    return packages


def _installation(installation: Installation | None) -> Installation:
    assert installation is not None
    return installation


class TestFindTritonserver:
    def test_release_with_its_own_backends(self, tmp_path: Path) -> None:
        binary = _release(tmp_path, python_version())
        found = find_tritonserver([_installation(from_release(binary))])
        assert found.binary == binary
        assert found.backend_directory == tmp_path / "backends"

    def test_release_for_another_python_gives_way_to_the_wheel(self, tmp_path: Path) -> None:
        release = from_release(_release(tmp_path / "opt", OTHER_VERSION))
        wheel = from_wheel(_wheel(tmp_path / "site", (OTHER_VERSION, python_version())))
        found = find_tritonserver([_installation(release), _installation(wheel)])
        assert found == wheel
        assert found.backend_directory is None
        assert found.libraries == (tmp_path / "site" / "nvidia_pytriton.libs",)

    def test_no_stub_for_this_python(self, tmp_path: Path) -> None:
        wheel = from_wheel(_wheel(tmp_path, ("3.10", "3.9", OTHER_VERSION)))
        with pytest.raises(ServerStartError, match=r"stubs for 3\.8, 3\.9, 3\.10 only") as caught:
            find_tritonserver([_installation(wheel)])
        assert python_version() in str(caught.value)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ServerStartError, match="not found") as caught:
            find_tritonserver([])
        assert "make install" in caught.value.hint
        assert f"pip install {WHEEL}" in caught.value.hint

    def test_no_wheel_for_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "machine_problem", lambda: "another processor")
        with pytest.raises(ServerStartError, match="not found") as caught:
            find_tritonserver([])
        assert caught.value.hint == "another processor; use NVIDIA's container: docker/README.md"

    def test_incomplete_trees_are_none(self, tmp_path: Path) -> None:
        assert from_release(tmp_path / "bin" / "tritonserver") is None
        assert from_wheel(tmp_path) is None
        assert _installation(from_release(_release(tmp_path, None))).stubs == {}


class TestRunDirectory:
    @pytest.fixture(autouse=True)
    def _private(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tmp").mkdir()
        (tmp_path / "shm").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(run_directory, "_SHARED_MEMORY", tmp_path / "shm")

    def test_backends_get_the_stub_with_its_run_bit(self, tmp_path: Path) -> None:
        wheel = _installation(from_wheel(_wheel(tmp_path, (OTHER_VERSION, python_version()))))
        wheel.stubs[python_version()].write_bytes(b"the right one")
        run = RunDirectory()
        backends = run.add_backends(wheel)
        stub = backends / "python" / STUB
        assert stub.read_bytes() == b"the right one"
        assert os.access(stub, os.X_OK)
        assert sorted(p.name for p in (backends / "python").iterdir()) == [
            "libtriton_python.so",
            STUB,
        ]
        run.remove()

    def test_own_backends_are_used_in_place(self, tmp_path: Path) -> None:
        release = _installation(from_release(_release(tmp_path, python_version())))
        run = RunDirectory()
        assert run.add_backends(release) == tmp_path / "backends"
        run.remove()

    def test_library_folder_holds_libpython_only(self) -> None:
        run = RunDirectory()
        assert [p.name for p in run.add_libpython().iterdir()] == [library_name()]
        run.remove()

    def test_remove_takes_its_shared_memory_and_no_other(self, tmp_path: Path) -> None:
        run = RunDirectory()
        _touch(tmp_path / "shm" / f"{run.shared_memory_prefix}1")
        other = _touch(tmp_path / "shm" / "trident-other-1")
        run.remove()
        run.remove()
        assert not run.path.exists()
        assert list((tmp_path / "shm").iterdir()) == [other]

    def test_left_overs_of_a_killed_launcher_go_with_the_next_start(self, tmp_path: Path) -> None:
        killed = RunDirectory()
        _touch(tmp_path / "shm" / f"{killed.shared_memory_prefix}1")
        os.close(killed.lock)
        running = RunDirectory()
        assert not killed.path.exists()
        assert not list((tmp_path / "shm").iterdir())
        remove_stale()
        assert running.path.exists()
        running.remove()

    def test_a_lock_that_the_server_inherited_protects(self) -> None:
        run = RunDirectory()
        inherited = os.dup(run.lock)
        os.close(run.lock)
        remove_stale()
        assert run.path.exists()
        os.close(inherited)
        remove_stale()
        assert not run.path.exists()

    def test_directories_of_others_are_left_alone(self, tmp_path: Path) -> None:
        theirs = tmp_path / "tmp" / "trident-notes"
        theirs.mkdir()
        remove_stale()
        assert theirs.exists()

    def test_lock_is_exclusive(self) -> None:
        run = RunDirectory()
        other = os.open(run.path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        run.remove()


class TestLibpython:
    def test_first_folder_that_has_it(self, tmp_path: Path) -> None:
        _touch(tmp_path / "b" / library_name())
        _touch(tmp_path / "c" / library_name())
        found = find_libpython([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
        assert found == tmp_path / "b" / library_name()

    def test_missing_names_the_package(self, tmp_path: Path) -> None:
        with pytest.raises(ServerStartError, match=library_name()) as caught:
            find_libpython([tmp_path])
        assert f"libpython{python_version()}" in caught.value.hint
        assert "uv venv" in caught.value.hint
        assert "conda" in caught.value.hint


class TestPorts:
    def test_free_ports_differ(self) -> None:
        assert len(set(pick_free(3))) == 3
        require_free([Endpoint(str(port), "0.0.0.0", port) for port in pick_free(3)])

    @pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
    def test_taken_port_names_its_flag(self, address: str) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ServerStartError, match=f"port {port} .grpc. is in use") as caught:
                require_free([Endpoint("grpc", address, port)])
        assert "--grpc-port" in caught.value.hint

    def test_one_port_for_two(self) -> None:
        (port,) = pick_free(1)
        with pytest.raises(ServerStartError, match="both --http-port and --grpc-port"):
            require_free([Endpoint(name, "0.0.0.0", port) for name in ("http", "grpc")])

    def test_address_of_another_machine(self) -> None:
        with pytest.raises(ServerStartError, match=r"192\.0\.2\.1"):
            require_free([Endpoint("http", "192.0.2.1", pick_free(1)[0])])

    def test_url(self) -> None:
        assert Endpoint("http", "0.0.0.0", 1).url == "localhost:1"
        assert Endpoint("http", "10.0.0.1", 1).url == "10.0.0.1:1"
        assert Endpoint("http", "::1", 1).url == "[::1]:1"


class TestEnvironment:
    def test_settings_become_variables(self) -> None:
        assert settings_variables(
            {"max_num_seqs": "8", "enable_prefix_caching": False, "dtype": None, "seed": 0}
        ) == {
            "TRIDENT_MAX_NUM_SEQS": "8",
            "TRIDENT_ENABLE_PREFIX_CACHING": "false",
            "TRIDENT_SEED": "0",
        }

    def test_variables_read_back_as_the_settings(self, tmp_path: Path) -> None:
        settings = {"max_batch_size": 4, "enable_chunked_prefill": False, "model": "/a b"}
        config = effective_config(tmp_path, settings_variables(settings))
        assert config.max_num_seqs == 4
        assert not config.enable_chunked_prefill
        assert config.model == "/a b"

    def test_engine_json_is_below_the_variables(self, tmp_path: Path) -> None:
        _touch(tmp_path / "engine" / "1" / "engine.json", b'{"max_num_seqs": 5, "seed": 3}')
        config = effective_config(tmp_path, {"TRIDENT_SEED": "4"})
        assert (config.max_num_seqs, config.seed) == (5, 4)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [({"max_num_seqs": "x"}, "max_num_seqs"), ({"no_such": 1}, "no_such")],
    )
    def test_wrong_setting(self, settings: dict[str, object], text: str) -> None:
        with pytest.raises(ServerStartError, match=text):
            settings_variables(settings)

    def test_wrong_variable(self, tmp_path: Path) -> None:
        with pytest.raises(ServerStartError, match="block_size"):
            effective_config(tmp_path, {"TRIDENT_BLOCK_SIZE": "-1"})

    def test_server_environment(self) -> None:
        environment = server_environment(
            {"PATH": "/usr/bin", "PYTHONHOME": "/wrong", "LD_LIBRARY_PATH": "/mine", "A": "b"},
            run_id="trident-x",
            libraries=(Path("/one"), Path("/two")),
            settings={"TRIDENT_SEED": "1"},
        )
        assert environment == {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin",
            "LD_LIBRARY_PATH": "/one:/two:/mine",
            "A": "b",
            "MALLOC_ARENA_MAX": "2",
            "TRIDENT_SEED": "1",
            RUN_ID: "trident-x",
        }

    def test_the_users_own_allocator_settings_stay(self) -> None:
        base = {"MALLOC_ARENA_MAX": "8"}
        environment = server_environment(base, run_id="r", libraries=(), settings={})
        assert environment["MALLOC_ARENA_MAX"] == "8"

    def test_the_admin_key_is_kept_from_the_models(self) -> None:
        base = {"TRIDENT_ADMIN_KEY": "0123456789abcdef", "HOME": "/h"}
        environment = server_environment(base, run_id="r", libraries=(), settings={})
        assert environment["HOME"] == "/h"
        assert "0123456789abcdef" not in environment.values()

    def test_interpreter_must_be_the_python3_of_its_folder(self, tmp_path: Path) -> None:
        executable = _touch(tmp_path / "python3.11")
        with pytest.raises(ServerStartError, match="python3 is not the Python"):
            interpreter_folder(executable)
        (tmp_path / "python3").symlink_to(executable)
        assert interpreter_folder(executable) == tmp_path


def test_what_is_missing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise ServerStartError("libpython is missing", "install it")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_directory, "find_libpython", missing)
    release = _installation(from_release(_release(tmp_path / "opt", python_version())))
    monkeypatch.setattr(server, "find_tritonserver", lambda: release)
    (tmp_path / "repository").mkdir()
    triton = server.TritonServer({}, repository=tmp_path / "repository", ports=0)
    with pytest.raises(ServerStartError, match="libpython is missing"):
        triton.start()
    assert not list(tmp_path.glob("trident-*"))


def test_kill_all_finds_a_child_in_a_session_of_its_own() -> None:
    child = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, RUN_ID: "trident-test-run"}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID: "another-run"})
    try:
        # Linux shows the environment a moment after the program has been started.
        while RUN_ID not in psutil.Process(child.pid).environ():
            time.sleep(0.01)
        kill_all("trident-test-run")
        assert not psutil.pid_exists(child.pid)
        child.wait()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


class TestRemoveEnvironment:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(processes, "_ENVIRONMENTS", tmp_path)
        monkeypatch.setattr(psutil, "process_iter", lambda attributes: [])
        folder = tmp_path / "python_env_abc"
        folder.mkdir()
        return folder

    def test_of_the_killed_server(self, folder: Path) -> None:
        processes.remove_environment(folder.stat().st_ctime - 1)
        assert not folder.exists()

    def test_of_another_time(self, folder: Path) -> None:
        processes.remove_environment(folder.stat().st_ctime + 1)
        processes.remove_environment(folder.stat().st_ctime - 60)
        assert folder.exists()

    def test_in_use(self, folder: Path) -> None:
        _touch(folder / "environment.tar")
        processes.remove_environment(folder.stat().st_ctime - 1)
        assert folder.exists()

    def test_maybe_of_another_server(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started = folder.stat().st_ctime - 1
        info = {"name": "tritonserver", "create_time": started + 0.5}
        other = SimpleNamespace(info=info)
        monkeypatch.setattr(psutil, "process_iter", lambda attributes: [other])
        processes.remove_environment(started)
        assert folder.exists()


class TestServerDisplay:
    DIED = "2026-11-20 16:56:00.000 WARNING trident.engine: the engine process hung; starting it"
    READY = "2026-11-20 16:56:09.000 INFO trident.engine: demo, KV cache for 64 tokens"

    def test_a_restart_is_shown_from_its_reason_to_its_end(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
        log = ServerLog(console)
        with log.loading("Starting"):
            log.show(self.READY)
        assert isinstance(console.file, io.StringIO)
        console.file.truncate(0)
        log.show(self.DIED)
        log.show(self.READY)
        shown = console.file.getvalue().strip("\0").splitlines()
        assert shown == ["the engine process hung; starting it", "The engine is ready again."]


class TestOwnName:
    def test_is_a_path_where_the_shell_does_not_know_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", [".venv/bin/trident", "serve"])
        monkeypatch.setenv("PATH", str(tmp_path))
        assert own_name() == ".venv/bin/trident"
        _touch(tmp_path / "trident").chmod(0o755)
        assert own_name() == "trident"


LOAD_FAILURE = r"""
E1120 16:37:07.834479 57 server.cc:241] "CudaDriverHelper has not been initialized."
2026-11-20 16:55:43.370 INFO trident.engine: loading the weights of /m
E1120 16:37:10.3 57 model_lifecycle.cc:642] "failed to load 'tokenizer' version 1: Internal: TritonModelException: /m: no tokenizer.json\n\nAt:\n  /r/model.py(9): initialize\n"
E1120 16:37:10.4 57 model_lifecycle.cc:642] "failed to load 'detokenizer' version 1: Internal: TritonModelException: /m: no tokenizer.json\n\nAt:\n  /r/model.py(9): initialize\n"
E1120 16:37:10.5 57 model_lifecycle.cc:642] "failed to load 'engine' version 1: Unavailable: TritonModelException: needs \"9 GB\" of memory\n\nAt:\n  /r/model.py(9): initialize\n"
error: creating server: Internal - failed to load all models
"""  # noqa: E501


class TestServerLog:
    def test_parse_lines_of_tritonserver_and_of_ours(self) -> None:
        theirs = server_log.parse('I1120 16:36:59.787646 5560 model.py:10] "a \\"b\\""')
        assert (theirs.severity, theirs.source, theirs.text) == ("I", "model.py", 'a "b"')
        assert not theirs.from_engine
        ours = server_log.parse("2026-11-20 16:55:43.370 WARNING trident.engine: low memory")
        assert (ours.severity, ours.source, ours.text) == ("W", "trident.engine", "low memory")
        assert ours.from_engine
        assert ours.is_problem
        assert server_log.parse("| a | b |").severity == ""

    def test_parse_our_lines_in_json(self) -> None:
        line = (
            '{"ts":"2026-11-20T16:55:43.370Z","level":"WARNING","logger":"trident.engine",'
            '"event":"low memory","fields":{"uid":7}}'
        )
        ours = server_log.parse(line)
        assert (ours.severity, ours.source, ours.text) == (
            "W",
            "trident.engine",
            "low memory uid=7",
        )
        for theirs in ('{"ts":1}', '{"ts":"cut off', '{"ts":[],"level":[],"fields":{},"event":1}'):
            assert server_log.parse(theirs) == server_log.LogLine("", "", theirs)

    def test_an_exception_in_json_is_shown(self) -> None:
        log = (
            '{"ts":"2026-11-20T16:55:43.370Z","level":"ERROR","logger":"trident.engine",'
            '"event":"start-up failed","fields":{"exception":"Traceback (most recent call last):'
            '\\n  File \\"/x.py\\", line 1\\nKeyError: \'torch\'"}}\n'
            "E1120 17:00:00.000000 7 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
            "Internal: TritonModelException: the engine process ended with status 1 before it was "
            'ready; its log says why"\n'
        )
        assert server_log.failure(log)[0].endswith("its log says why:\nKeyError: 'torch'")

    def test_what_a_machine_without_gpu_says_is_no_problem(self) -> None:
        line = server_log.parse('E1120 16:36:57.3 1 server.cc:241] "CudaDriverHelper has not been"')
        assert not line.is_problem
        assert server_log.parse('E1120 16:36:57.3 1 a.cc:1] "CUDA out of memory"').is_problem

    def test_failure_gives_each_reason_once_in_its_own_words(self) -> None:
        reason, hint = server_log.failure(LOAD_FAILURE)
        assert reason == '/m: no tokenizer.json\nneeds "9 GB" of memory'
        assert "--max-model-len" in hint

    def test_an_exception_of_the_engine_process_is_shown(self) -> None:
        log = (
            "Traceback (most recent call last):\n"
            '  File "/x.py", line 1, in <module>\n'
            "ModuleNotFoundError: No module named 'torch'\n"
            "E1120 17:00:00.000000 7 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
            "Internal: TritonModelException: the engine process ended with status 1 before it was "
            'ready; its log says why"\n'
        )
        reason, _ = server_log.failure(log)
        assert reason.endswith("its log says why:\nModuleNotFoundError: No module named 'torch'")

    @pytest.mark.parametrize(
        ("log", "reason"),
        [
            ("/x/tritonserver: unrecognized option '--foo'\nUsage:", "unrecognized option '--foo'"),
            ("error: creating server: Internal - no\n", "creating server: Internal - no"),
            (
                "tritonserver: error while loading shared libraries: libb64.so",
                "error while loading shared libraries: libb64.so",
            ),
            ("", "tritonserver ended without saying why"),
        ],
    )
    def test_other_failures(self, log: str, reason: str) -> None:
        assert server_log.failure(log)[0] == reason

    def test_reader_returns_complete_lines_once(self, tmp_path: Path) -> None:
        path = _touch(tmp_path / "log", b"a\nb")
        reader = server_log.LogReader(path)
        assert reader.lines() == ["a"]
        assert reader.lines() == []
        with path.open("ab") as file:
            file.write("ü\nc".encode())
        assert reader.lines() == ["bü"]

    def test_reader_keeps_the_file_small_and_loses_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        reader = server_log.LogReader(path, max_bytes=100)
        seen: list[str] = []
        with path.open("ab", buffering=0) as file:
            for number in range(100):
                file.write(b"line %d\npart" % number)
                seen += reader.lines()
                file.write(b"\n")
                seen += reader.lines()
                assert path.stat().st_size < 120
        assert seen == [text for number in range(100) for text in (f"line {number}", "part")]
