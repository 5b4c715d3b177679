"""The cache folder of `trident bench`."""

import os
from pathlib import Path


def cache_folder(*names: str) -> Path:
    """Return `$XDG_CACHE_HOME/trident/<names>` (`~/.cache` by default); it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("trident", *names)
