"""The environment variables of tritonserver."""

import sys
from pathlib import Path

import pytest

import engine
from engine.launch.environment import (
    RUN_ID,
    effective_config,
    interpreter_folder,
    server_environment,
    settings_variables,
)
from engine.launch.errors import ServerStartError
from engine.service.stub.environment import engine_environment
from tests.engine.launch.installations import touch


def test_settings_become_variables() -> None:
    assert settings_variables(
        {"max_num_seqs": "8", "enable_prefix_caching": False, "dtype": None, "seed": 0}
    ) == {
        "TRIDENT_MAX_NUM_SEQS": "8",
        "TRIDENT_ENABLE_PREFIX_CACHING": "false",
        "TRIDENT_SEED": "0",
    }


def test_variables_read_back_as_the_settings(tmp_path: Path) -> None:
    touch(tmp_path / "engine" / "1" / "engine.json", b'{"max_model_len": 5, "seed": 3}')
    settings = {"max_batch_size": 4, "enable_chunked_prefill": False, "model": "/a b"}
    settings |= {"max_model_len": "auto", "hf_overrides": '{"a": {"b": "\u00e9\'$"}}'}
    config = effective_config(tmp_path, settings_variables(settings))
    assert (config.max_model_len, config.seed) == (None, 3)
    assert config.hf_overrides == {"a": {"b": "\u00e9'$"}}
    assert config.max_num_seqs == 4
    assert not config.enable_chunked_prefill
    assert config.model == "/a b"


def test_engine_json_is_below_the_variables(tmp_path: Path) -> None:
    touch(tmp_path / "engine" / "1" / "engine.json", b'{"max_num_seqs": 5, "seed": 3}')
    config = effective_config(tmp_path, {"TRIDENT_SEED": "4"})
    assert (config.max_num_seqs, config.seed) == (5, 4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"max_num_seqs": "x"}, "max_num_seqs"), ({"no_such": 1}, "no_such")],
)
def test_wrong_setting(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ServerStartError, match=text):
        settings_variables(settings)


def test_wrong_variable(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="block_size"):
        effective_config(tmp_path, {"TRIDENT_BLOCK_SIZE": "-1"})


def test_server_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{server_environment.__module__}.find_library", lambda name: None)
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


def test_server_environment_has_no_empty_folder_in_a_path() -> None:
    base = {"PATH": ":/usr/bin:", "LD_LIBRARY_PATH": ":/mine"}
    environment = server_environment(base, run_id="r", libraries=(), settings={})
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == "/mine"


def test_engine_environment_has_no_working_directory_in_a_path() -> None:
    environment = engine_environment({"PYTHONPATH": ":/mine:", "A": "b"})
    assert environment["PYTHONPATH"] == f"{Path(engine.__file__).parents[1]}:/mine"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["A"] == "b"


def test_the_users_own_allocator_settings_stay() -> None:
    base = {"MALLOC_ARENA_MAX": "8", "LD_PRELOAD": "libjemalloc.so.2"}
    environment = server_environment(base, run_id="r", libraries=(), settings={})
    assert base.items() <= environment.items()


def test_tcmalloc_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tcmalloc_minimal": "libtcmalloc_minimal.so.4"}
    monkeypatch.setattr(f"{server_environment.__module__}.find_library", installed.get)
    environment = server_environment({}, run_id="r", libraries=(), settings={})
    assert environment["LD_PRELOAD"] == "libtcmalloc_minimal.so.4"


def test_the_admin_key_is_kept_from_the_models() -> None:
    base = {"TRIDENT_ADMIN_KEY": "0123456789abcdef", "HOME": "/h"}
    environment = server_environment(base, run_id="r", libraries=(), settings={})
    assert environment["HOME"] == "/h"
    assert "0123456789abcdef" not in environment.values()


def test_interpreter_must_be_the_python3_of_its_folder(tmp_path: Path) -> None:
    executable = touch(tmp_path / "python3.11")
    with pytest.raises(ServerStartError, match="python3 is not the Python"):
        interpreter_folder(executable)
    (tmp_path / "python3").symlink_to(executable)
    assert interpreter_folder(executable) == tmp_path
