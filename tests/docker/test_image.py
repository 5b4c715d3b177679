"""The Dockerfile, the Compose files and what they rest on."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from engine.config.engine_config import EngineConfig
from engine.launch.security import TLS_VARIABLES
from tests.docker.files import DOCKER, ROOT, read_yaml

DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
TORCH = ("cuda", "cpu")
COMPOSE = ("compose.yaml", "compose.gpu.yaml")


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "docker/Dockerfile"],
        ["shellcheck", "docker/entrypoint", "docker/build-launcher"],
        ["ruff", "check", "docker/healthcheck"],
        [
            *("check-jsonschema", "--builtin-schema", "vendor.compose-spec"),
            *(f"docker/{name}" for name in COMPOSE),
        ],
    ],
    ids=lambda command: command[0],
)
def test_linters(command: list[str]) -> None:
    program = Path(sys.executable).parent / command[0]
    checked = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _joined() -> str:
    """Return the Dockerfile without comments, each instruction in one line."""
    return re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))


def _instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} +(.+)$", _joined(), re.MULTILINE)


def test_every_image_has_a_full_version() -> None:
    stages = [re.split(r"\s+AS\s+", each) for each in _instructions("FROM")]
    named = {stage[1] for stage in stages if len(stage) == 2}
    images = [stage[0] for stage in stages if stage[0] not in named]
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    images += [service["image"] for service in services.values()]
    assert len(images) == 4
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-py3|-cpu)?", image), image


def test_the_server_is_not_root() -> None:
    assert _instructions("USER") == ["1000:1000"]


def _stages() -> dict[str, list[str]]:
    """Return the instructions of each build stage by its name; those of the last by ``."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in _joined().splitlines():
        if line.startswith("FROM "):
            name = line.split(" AS ")[1] if " AS " in line else ""
            parent = line.split()[1]
            found[name] = list(found.get(parent, []))
        elif name in found:
            found[name].append(line)
    return found


def test_the_compiler_does_not_stay() -> None:
    stages = _stages()
    assert any("g++" in line for line in stages["compiler"])
    for line in stages[""]:
        assert "apt-get" not in line
        assert "gcc" not in line
    # Only what was built is taken from the stages that have it.
    copied = [line for line in stages[""] if line.startswith("COPY --from=")]
    assert {line.split()[1] for line in copied} == {"--from=packages", "--from=compiled"}


def test_no_kernels_of_the_machine_that_builds_the_image() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert lines.index("kernels/cpu/build") > lines.index("!kernels")  # the last that fits counts
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "kernels/cpu/build" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]


def test_every_setting_reaches_compose() -> None:
    environment = read_yaml(DOCKER / "compose.yaml")["services"]["trident"]["environment"]
    assert len(set(environment)) == len(environment)
    settings = {f"TRIDENT_{name.upper()}" for name in EngineConfig.model_fields}
    keys = {"TRIDENT_ADMIN_KEY", "TRIDENT_API_KEY", "TRIDENT_API_KEY_FILE"}
    # With TLS the gateway beside the server, its client, needs an authority and perhaps more.
    gateway = {f"TRIDENT_TLS_{name}" for name in ("CA", "CERT", "KEY", "NAME")}
    security = {*keys, *TLS_VARIABLES, *gateway}
    assert {each for each in environment if each.startswith("TRIDENT_")} == settings | security
    assert {"HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} <= set(environment)
    assert not any("=" in each for each in environment)  # so that what is unset stays unset


def test_the_cache_is_a_named_volume() -> None:
    compose = read_yaml(DOCKER / "compose.yaml")
    mounts = dict(reversed(m.split(":")[:2]) for m in compose["services"]["trident"]["volumes"])
    folder = "/var/cache/trident"
    assert mounts[folder] in compose["volumes"]
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        assert f"{name}={folder}/" in DOCKERFILE


def test_only_gpus_get_cuda() -> None:
    torch = {
        name: read_yaml(DOCKER / name)["services"]["trident"]["build"]["args"]["TORCH"]
        for name in COMPOSE
    }
    assert torch == {"compose.yaml": "cpu", "compose.gpu.yaml": "cuda"}
    for name in ("requirements.lock", "torch-cpu.lock"):
        text = (DOCKER / name).read_text(encoding="utf-8")
        assert not re.search(r"^(nvidia-|cuda-toolkit|torch==)", text, re.MULTILINE)
    (version,) = re.findall(
        r"torch-([\d.]+)%2Bcpu-cp312", (DOCKER / "torch-cpu.lock").read_text(encoding="utf-8")
    )
    assert Version(version) == _locked()["torch"]


def test_what_is_copied_exists_and_is_sent() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    sent = [line[1:] for line in lines if line.startswith("!")]
    for arguments in _instructions("COPY"):
        words = [word for word in arguments.split() if not word.startswith("--")]
        if "--from=" in arguments:
            continue
        for source in (each.replace("${TORCH}", torch) for each in words[:-1] for torch in TORCH):
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source


def _locked() -> dict[str, Version]:
    names = ("requirements.lock", "torch-cuda.lock")
    lines = "".join((DOCKER / each).read_text(encoding="utf-8") for each in names).splitlines()
    pins = (re.match(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {pin[1].lower(): Version(pin[2]) for pin in pins if pin}


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = _locked()
    for requirement in map(Requirement, project["dependencies"]):
        assert locked[requirement.name.lower()] in requirement.specifier, requirement


def test_every_locked_file_has_a_hash() -> None:
    for name in ("requirements.lock", "torch-cuda.lock", "torch-cpu.lock", "build.lock"):
        text = (DOCKER / name).read_text(encoding="utf-8")
        pins = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
        assert pins
        for pin in pins:
            assert re.match(
                r"[\w.-]+(==| @ https:)\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+\Z", pin
            ), pin
