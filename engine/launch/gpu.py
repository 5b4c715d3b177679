"""Whether NVIDIA's driver is on this machine."""

from pathlib import Path

_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second under Windows


def has_gpu() -> bool:
    """Return whether the device files of NVIDIA's driver are there; its libraries may be always."""
    return any(each.exists() for each in _DEVICES)
