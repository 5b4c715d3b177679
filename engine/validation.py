"""One readable line out of a pydantic `ValidationError`."""

from pydantic import ValidationError


def describe(error: ValidationError) -> str:
    """Return all faults as `field: what is wrong (got value)`, joined with semicolons."""
    return "; ".join(_describe_one(dict(fault)) for fault in error.errors(include_url=False))


def _describe_one(fault: dict[str, object]) -> str:
    location = fault["loc"]
    assert isinstance(location, tuple)
    field = ".".join(str(part) for part in location) or "value"
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not location and fault["type"] == "value_error":
        return message  # of a validator over several fields, which names them itself
    value = repr(fault["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    return f"{field}: {message} (got {shown})"
