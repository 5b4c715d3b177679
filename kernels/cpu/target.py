"""The instruction sets that the CPU kernels are compiled for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set to compile for.

    Attributes:
        name: part of the library's file name.
        needs: flags of /proc/cpuinfo that the processor must have.
        options: compiler options; the macros select the vector types of torch's headers.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


_COMMON = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",  # forms of a loop for different numbers of rows round alike
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-w",  # warnings are of torch's headers; ours are clean with -Wall -Wextra
)
_V3 = (*_COMMON, "-march=x86-64-v3", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2")
_V4 = (*_COMMON, "-march=x86-64-v4", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Best first.
TARGETS = (
    Target(
        "avx512_bf16",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        (*_V4, "-mavx512bf16", "-mavx512vnni"),
    ),
    Target("avx512_vnni", _AVX512 | {"avx512_vnni"}, (*_V4, "-mavx512vnni")),
    Target("avx512", _AVX512, _V4),
    Target("avx2_vnni", _AVX2 | {"avx_vnni"}, (*_V3, "-mavxvnni")),
    Target("avx2", _AVX2, _V3),
)


def targets() -> list[Target]:
    """Return the targets that this machine can run, best first; none unless it is x86-64."""
    flags = _processor_flags() if platform.machine() == "x86_64" else frozenset()
    return [target for target in TARGETS if target.needs <= flags]


def processor_name() -> str:
    """Return the processor's name for people, empty if it has none."""
    return _processor("model name")


def _processor_flags() -> frozenset[str]:
    return frozenset(_processor("flags").split())


@cache
def _processor(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(field)), "").partition(":")[2].strip()
