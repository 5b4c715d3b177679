"""The version of Trident."""

from importlib import metadata


def version() -> str:
    """Return the version that is installed."""
    try:
        return metadata.version("trident-llm")
    except metadata.PackageNotFoundError:
        return "0"
