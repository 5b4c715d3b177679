"""Files of llama.cpp, downloaded from PyPI: they are others', so none is in this repository."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_SOURCE = "llama-cpp-python==0.3.36"


def download(folder: Path, part: str) -> Path:
    """Put the files whose path has `part` in it into `folder`, or skip the test."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    result = subprocess.run([*command, "--no-binary=:all:", _SOURCE], check=False)
    if result.returncode != 0:
        pytest.skip(f"{_SOURCE} cannot be downloaded")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and part in member.name:
                member.name = Path(member.name).name
                tar.extract(member, folder, filter="data")
    return folder
