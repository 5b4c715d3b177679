"""The setting `device` of the null device, which computes no model: `null`, or `null:MS`."""

import re

MAX_STEP_MS = 60_000


def step_s(device: str) -> float | None:
    """Return the seconds of a step in `null` or `null:MS`; None if `device` is neither."""
    if device == "null":
        return 0.0
    digits = device.removeprefix("null:")
    if digits == device or re.fullmatch(r"\d+(\.\d+)?", digits, re.ASCII) is None:
        return None
    milliseconds = float(digits)
    return milliseconds / 1000 if milliseconds <= MAX_STEP_MS else None
