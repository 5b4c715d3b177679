"""Downloads the wheels that `python -m engine.bench` needs on a machine without a network.

python -m engine.bench.pack           # the pinned wheels, into .gpu-wheels/
python -m engine.bench.pack --pin     # pin the newest versions in packages.txt first
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence

from engine.bench.gpu.packages import LOCK, PACKED, REQUIRED, ROOT, WHEELS

VERSIONS = ("3.11", "3.12")
# Dependencies that are only needed to download from the hub, or by commands.
UNUSED = (*REQUIRED, "hf-xet", "typer", "shellingham", "annotated-doc")
_PLATFORMS = ("2_34", "2_28", "2_27", "2_17", "2_12", "2_5")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.pack", description=__doc__)
    parser.add_argument("--pin", action="store_true", help="pin the newest versions first")
    if parser.parse_args(arguments).pin:
        LOCK.write_text(pinned())
    shutil.rmtree(WHEELS, ignore_errors=True)
    for version in VERSIONS:  # pip checks the hashes
        command = [*_PIP, "download", *_target(version), "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--dest", WHEELS, "--requirement", LOCK], check=True)
    num_bytes = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(f"{num_bytes / 1e6:.1f} MB, in {WHEELS.name}/")


def pinned() -> str:
    """Return the content of `packages.txt` for the newest versions that pyproject.toml allows."""
    hashes: dict[str, set[str]] = defaultdict(set)
    for version in VERSIONS:
        command = [*_PIP, "install", *_target(version), "--dry-run", "--ignore-installed"]
        command += ["--target", "unused", "--report", "-", *_requirements()]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        for package in json.loads(found)["install"]:
            name = package["metadata"]["name"].lower().replace("_", "-")
            if name not in UNUSED:
                digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
                hashes[f"{name}=={package['metadata']['version']}"].add(digest)
    lines = ["# Written by `python -m engine.bench.pack --pin`."]
    for requirement in sorted(hashes):
        digests = [f"--hash=sha256:{digest}" for digest in sorted(hashes[requirement])]
        lines.append(" \\\n    ".join([requirement, *digests]))
    return "\n".join(lines) + "\n"


def _requirements() -> list[str]:
    """Return the packages with the ranges of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ranges = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    return [line for line in ranges if line.partition(">")[0] in PACKED]


def _target(version: str) -> list[str]:
    """Return pip's options for wheels of x86-64 Linux and a version of Python."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    for platform in _PLATFORMS:
        options += ["--platform", f"manylinux_{platform}_x86_64"]
    return [*options, "--platform", "manylinux2014_x86_64", "--platform", "manylinux2010_x86_64"]


if __name__ == "__main__":
    main()
