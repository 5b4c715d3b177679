"""What the READMEs say is so; their commands that need no server of ours are tried."""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from functools import cache

import pytest

from engine.config.engine_config import EngineConfig
from engine.execution.devices import CPU_LIMITS, GPU_LIMITS, LARGE_GPU_LIMITS
from tests.factories.readmes import ROOT, Example, examples, pages

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "model_repository" / "README.md").read_text(encoding="utf-8")

# Where a command is run, by how it begins. Each command of a README has exactly one place.
HERE = r"(\.venv/bin/)?python -m |\.venv/bin/trident bench |make |TRITON_INTERPRET=1 "
SERVER = r"curl |(\.venv/bin/)?trident (run|chat|health|serve)\b"
# There is no Docker engine where the tests run, but hadolint and the schema of Compose
# (tests/docker); the others prepare what follows them, or are run by the test that is named.
ELSEWHERE = {
    r"docker ": "tests/docker",
    r"\.venv/bin/trident gateway ": "tests/server/gateway/test_command.py",
    r"export ": "tests/docker/test_entrypoint.py",
    r"nsys ": "tests/engine/test_nvtx.py",
    r"(aiperf|genai-perf|perf_analyzer) ": "tests/client/bench/test_other_generators.py",
    r"client/bench/offline\.sh ": "tests/client/bench/test_offline.py",
    r"TRIDENT_MODEL=\S+ tritonserver ": "tests/server/resilience/test_kill.py",
}

COMMANDS = [e for e in examples() if e.language == "console" and re.match(HERE, e.text)]


def test_every_command_is_run_in_one_place() -> None:
    for example in examples():
        if example.language == "console":
            places = [p for p in (HERE, SERVER, *ELSEWHERE) if re.match(p, example.text)]
            assert len(places) == 1, f"{example} is run by {places}"
    for test in ELSEWHERE.values():
        assert (ROOT / test).exists()


@pytest.mark.slow
@pytest.mark.parametrize("example", COMMANDS, ids=str)
def test_a_command_knows_its_options(example: Example) -> None:
    """They take minutes or a GPU: their own `--help` must name each option, make each target."""
    words = shlex.split(example.text, comments=True)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        _succeeds("make", "--dry-run", *targets)
        return
    if words[0].startswith("TRITON_INTERPRET"):
        words = words[1:]
    if "pytest" in words:
        text = _help_of_pytest()
    elif "bench" in words:
        named = [word for word in words[1:3] if not word.startswith("--")]
        text = _help("client.cli", *named)
    else:
        text = _help(words[2])
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", text), f"{option} is not in the help"


def _help(module: str, *arguments: str) -> str:
    """Return what `python -m module arguments --help` prints; run here, where torch is loaded."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        patch.setattr(sys, "argv", [module, *arguments, "--help"])
        patch.setenv("COLUMNS", "200")
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        with pytest.raises(SystemExit) as exit_:
            runpy.run_module(module, run_name="__main__")
    assert exit_.value.code in (None, 0)
    return printed.getvalue()


@cache
def _help_of_pytest() -> str:
    """Return the help with the options of all folders that a command names."""
    commands = (shlex.split(each.text, comments=True) for each in COMMANDS)
    folders = {words[words.index("pytest") + 1] for words in commands if "pytest" in words}
    return _succeeds(sys.executable, "-m", "pytest", *sorted(folders), "--help")


@cache
def _succeeds(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_that_a_docker_command_names_exists() -> None:
    for example in examples():
        if example.text.startswith("docker "):
            for name in re.findall(r"\bdocker/\S+", example.text):
                assert (ROOT / name).is_file(), name


def test_every_setting_is_in_the_table_and_nothing_else() -> None:
    table = SETTINGS.split("## Settings")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(EngineConfig.model_fields)


def test_the_defaults_in_the_table_are_those_of_the_code() -> None:
    for name in ("max_num_queued_reqs", "block_size"):
        assert re.search(rf"\| `{name}` \| {EngineConfig.model_fields[name].default} \|", SETTINGS)
    (seqs, tokens), (gpu_seqs, gpu_tokens), large = CPU_LIMITS, GPU_LIMITS, LARGE_GPU_LIMITS
    assert f"| `max_num_seqs` | {seqs} on a CPU, {gpu_seqs} on a GPU |" in SETTINGS
    assert (gpu_seqs, gpu_tokens) == (large.max_num_seqs, tokens)
    large_tokens = f"{large.max_num_batched_tokens} on a GPU of 80 GB from Hopper on"
    assert f"| `max_num_batched_tokens` | {tokens}; {large_tokens} |" in SETTINGS


def test_every_link_leads_somewhere() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 150
