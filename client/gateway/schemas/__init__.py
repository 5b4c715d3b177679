"""Bodies of requests (pydantic) and of responses (msgspec)."""
