"""Measured limits of this machine, taken in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from client.bench.errors import BenchError
from engine.service.stub.environment import engine_environment

_WORKER = "engine.bench.cpu_ceilings"


@dataclass(frozen=True)
class Ceilings:
    """Read bandwidth in bytes/s, and rates of matrix products in operations/s."""

    read: float
    bf16: float
    int8: float

    @property
    def description(self) -> str:
        """The figures as text."""
        return (
            f"this machine reads {self.read / 1e9:.1f} GB/s and multiplies matrices at "
            f"{self.bf16 / 1e12:.2f} TFLOP/s in bf16, {self.int8 / 1e12:.2f} TOP/s in int8"
        )


def measure() -> Ceilings:
    """Measure, which takes a few seconds.

    Raises:
        BenchError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", _WORKER],
        env=engine_environment(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BenchError(f"the machine's ceilings cannot be measured: {words[-1]}")
    return Ceilings(**json.loads(done.stdout))


def highest(measured: Sequence[Ceilings]) -> Ceilings:
    """Return the best figure of each kind: other load only lowers them."""
    return Ceilings(
        read=max(each.read for each in measured),
        bf16=max(each.bf16 for each in measured),
        int8=max(each.int8 for each in measured),
    )
