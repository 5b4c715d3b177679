"""The packages that the engine, its tests and this benchmark import; the standard library aside."""

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
    """Return what is missing on this machine and how to have it there; None if nothing is."""
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
