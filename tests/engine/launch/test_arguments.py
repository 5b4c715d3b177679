"""Flags: what the launcher reads of tritonserver's, and what it refuses."""

import pytest

from engine.config.engine_config import EngineConfig
from engine.launch import arguments as flags
from engine.launch.errors import ServerStartError


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--http-port", "1"], "1"),
        (["--http-port=1"], "1"),
        (["--http-port=1", "--http-port", "2"], "2"),
        (["--http-port-range=1"], None),
        (["--http-port"], None),
    ],
)
def test_value_of(arguments: list[str], value: str | None) -> None:
    assert flags.value_of(arguments, "--http-port") == value


def _ports(arguments: list[str], default_port: int | None = None) -> dict[str, int]:
    services, _ = flags.endpoints(arguments, default_port)
    return {name: endpoint.port for name, endpoint in services.items()}


def test_default_ports() -> None:
    assert _ports([]) == {"http": 8000, "grpc": 8001, "metrics": 8002}


def test_given_ports_and_services_that_are_off() -> None:
    assert _ports(["--http-port", "1", "--grpc-port=2", "--allow-metrics=false"]) == {
        "http": 1,
        "grpc": 2,
    }


def test_port_0_is_a_free_one_that_tritonserver_is_told() -> None:
    services, arguments = flags.endpoints(["--http-port=0"], 0)
    ports = {endpoint.port for endpoint in services.values()}
    assert len(ports - {0}) == 3
    for name, endpoint in services.items():
        assert flags.value_of(arguments, f"--{name}-port") == str(endpoint.port)


def test_addresses_as_tritonserver_takes_them() -> None:
    services, _ = flags.endpoints(["--http-address", "127.0.0.1"])
    assert services["http"].address == services["metrics"].address == "127.0.0.1"
    assert services["grpc"].address == "127.0.0.1"


def test_only_this_machine_unless_told_otherwise() -> None:
    for host in (None, "0.0.0.0", "10.0.0.1"):
        services, arguments = flags.endpoints([], **({} if host is None else {"host": host}))
        for name, endpoint in services.items():
            assert endpoint.address == (host or "127.0.0.1")
            assert flags.value_of(arguments, f"--{name}-address") == endpoint.address


def test_an_address_of_its_own_goes_before_the_host() -> None:
    services, arguments = flags.endpoints(["--http-address=127.0.0.1"], host="0.0.0.0")
    addresses = {name: endpoint.address for name, endpoint in services.items()}
    assert addresses == {"http": "127.0.0.1", "grpc": "0.0.0.0", "metrics": "127.0.0.1"}
    assert flags.value_of(arguments, "--http-address") == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "model", "left"),
    [
        ([], None, []),
        (["/models/a b"], "/models/a b", []),
        (["m", "--http-port", "1"], "m", ["--http-port", "1"]),
        (["--http-port", "1", "m"], "m", ["--http-port", "1"]),
        (["--http-port=1", "m", "--log-verbose=1"], "m", ["--http-port=1", "--log-verbose=1"]),
        (["--cache-config", "-1"], None, ["--cache-config", "-1"]),
        (["m", "--no-value", "--http-port", "1"], "m", ["--no-value", "--http-port", "1"]),
    ],
)
def test_split_model(words: list[str], model: str | None, left: list[str]) -> None:
    assert flags.split_model(words) == (model, left)


def test_two_models() -> None:
    with pytest.raises(ServerStartError, match="got a and b"):
        flags.split_model(["a", "--http-port", "1", "b"])


@pytest.mark.parametrize("port", ["x", "-1", "65536", "8e3", ""])
def test_wrong_port(port: str) -> None:
    with pytest.raises(ServerStartError, match="--grpc-port"):
        flags.endpoints([f"--grpc-port={port}x" if port == "" else f"--grpc-port={port}"])


def test_time_to_exit() -> None:
    assert flags.exit_timeout([]) == flags.DEFAULT_EXIT_TIMEOUT_S
    assert flags.exit_timeout(["--exit-timeout-secs=60"]) == 60
    with pytest.raises(ServerStartError, match="--exit-timeout-secs must be a number of seconds"):
        flags.exit_timeout(["--exit-timeout-secs", "1.5"])


def test_every_setting_has_flags() -> None:
    names = flags.setting_flags()
    assert set(names) == set(EngineConfig.model_fields)
    assert names["max_num_seqs"] == ("--max-num-seqs", "--max-batch-size")
    assert names["model"] == ("--model",)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model-repository=/x"], "--model-repository is set by trident"),
        (["--backend-directory", "/x"], "--backend-directory is set by trident"),
        (["--max-num-seq", "3"], "unknown flag --max-num-seq"),
        (["-O3"], "unknown flag -O3"),
    ],
)
def test_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(ServerStartError, match=text):
        flags.check(arguments)


@pytest.mark.parametrize("name", ["max-num-seqs", "tensor-parallel-size"])
def test_a_flag_with_underscores_is_told_without(name: str) -> None:
    with pytest.raises(ServerStartError, match=f"unknown flag --{name.replace('-', '_')}") as told:
        flags.check([f"--{name.replace('-', '_')}=2"])
    assert told.value.hint == f"did you mean --{name}?"


def test_tritonservers_own_flags_pass() -> None:
    flags.check(
        [
            *["--log-verbose", "1", "--http-port=1", "--model-control-mode=explicit"],
            *["--load-model=x", "--backend-config=python,a=b", "--model-config-name=vllm"],
        ]
    )
