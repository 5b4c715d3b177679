"""Packages that the engine, its tests and this benchmark need besides the standard library."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "jinja2",
    "pydantic",
    "msgspec",
    "psutil",
    "rich",
    "pytest",
)


def problem() -> str | None:
    """Return which packages are missing and how to install them; None if none are."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    names = " ".join(missing)
    return (
        f"missing Python packages: {', '.join(missing)}. Install them; for a machine without a "
        f"network, fetch them elsewhere (pip download {names}), install them there into a folder "
        "(pip install --no-index --find-links WHEELS --target FOLDER "
        f"{names}) and name it in PYTHONPATH"
    )
