"""Gives the Python that Triton's stub embeds what other Pythons have: a working directory."""

from __future__ import annotations

import contextlib
import os


def adapt() -> None:
    """Use the working directory of the parent process, which is tritonserver."""
    # The launcher starts a stub in an empty directory, for a stub imports from where it starts.
    with contextlib.suppress(OSError):
        os.chdir(f"/proc/{os.getppid()}/cwd")
