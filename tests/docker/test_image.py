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

from tests.docker.files import DOCKER, ROOT, read_yaml

DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = ("compose.yaml", "compose.gpu.yaml")


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "docker/Dockerfile"],
        ["shellcheck", "docker/entrypoint"],
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


def _instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name} +(.+)$", joined, re.MULTILINE)


def test_every_image_has_a_full_version() -> None:
    stages = [re.split(r"\s+AS\s+", each) for each in _instructions("FROM")]
    named = {stage[1] for stage in stages if len(stage) == 2}
    images = [stage[0] for stage in stages if stage[0] not in named]
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    images += [service["image"] for service in services.values()]
    assert len(images) == 4
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-py3)?", image), image


def test_the_server_is_not_root() -> None:
    assert _instructions("USER") == ["1000:1000"]


def test_what_is_copied_exists_and_is_sent() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    sent = [line[1:] for line in lines if line.startswith("!")]
    for arguments in _instructions("COPY"):
        words = [word for word in arguments.split() if not word.startswith("--")]
        if "--from=" in arguments:
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source


def _locked() -> dict[str, Version]:
    lines = (DOCKER / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = (re.match(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {pin[1].lower(): Version(pin[2]) for pin in pins if pin}


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = _locked()
    for requirement in map(Requirement, project["dependencies"]):
        assert locked[requirement.name.lower()] in requirement.specifier, requirement


def test_every_locked_file_has_a_hash() -> None:
    for name in ("requirements.lock", "build.lock"):
        text = (DOCKER / name).read_text(encoding="utf-8")
        pins = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
        assert pins
        for pin in pins:
            assert re.match(r"[\w.-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+\Z", pin), (
                pin
            )
