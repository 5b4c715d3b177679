"""What Trident needs of a machine and of a Python, checked before anything is installed.

    python3 -m engine.launch.requirements

prints the first thing that is missing; it exits with 1 if the Python lacks it, 2 if the machine
does. It needs the standard library only and runs on Pythons that cannot run Trident.
"""

import importlib.util
import os
import platform
import sys

# numpy < 2, which release 24.10 of tritonserver needs, has no wheel for Python 3.13.
PYTHON_VERSIONS = ((3, 11), (3, 12))
# What the wheel nvidia-pytriton is built for (manylinux_2_35_x86_64).
MACHINE = "x86_64"
MIN_GLIBC = (2, 35)


def machine_problem() -> str:
    """Return why tritonserver's wheel cannot run on this machine, or an empty string."""
    needs = f"tritonserver's wheel needs Linux on x86-64 with glibc {_dotted(MIN_GLIBC)} or newer"
    if platform.system() != "Linux" or platform.machine() != MACHINE:
        return f"{needs} (this is {platform.system()} on {platform.machine()})"
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (OSError, ValueError):
        return f"{needs} (this system has another C library)"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_GLIBC:
        return f"{needs} (this is {name} {version}; Ubuntu 22.04 and Debian 12 have newer ones)"
    return ""


def python_problem() -> str:
    """Return why the running Python cannot run Trident, or an empty string."""
    running = f"Python {platform.python_version()}"
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        return f"{running}: Trident needs {' or '.join(map(_dotted, PYTHON_VERSIONS))}"
    version = _dotted(sys.version_info[:2])
    # Debian has both in a package of their own; without ensurepip, venv makes no pip.
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        return f"{running} lacks venv; on Debian or Ubuntu: apt-get install python{version}-venv"
    from engine.launch.errors import ServerStartError
    from engine.launch.libpython import find_libpython

    try:
        find_libpython()
    except ServerStartError as error:
        return f"{error}; {error.hint}"
    return ""


def _dotted(version: "tuple[int, ...]") -> str:
    return ".".join(map(str, version))


def main() -> int:
    """Print the first problem; return the exit status."""
    for status, find in ((2, machine_problem), (1, python_problem)):
        problem = find()
        if problem:
            print(problem)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
