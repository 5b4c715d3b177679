"""What may still become of UTF-8 text that comes byte by byte."""

from __future__ import annotations


def is_continuation(byte: int) -> bool:
    """Whether `byte` can only stand inside a character."""
    return byte & 0xC0 == 0x80


def incomplete_end(tail: bytes) -> bytes:
    """Return the bytes of the character that is open at the end of UTF-8 text; empty if none is."""
    for length in range(1, min(3, len(tail)) + 1):
        if not is_continuation(tail[-length]):
            try:
                tail[-length:].decode("utf-8")
            except UnicodeDecodeError as error:
                return tail[-length:] if error.reason == "unexpected end of data" else b""
            break
    return b""


def invalid_start(data: bytes) -> int | None:
    """Return where `data` stops being the beginning of UTF-8 text; None if it may be one."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return None if error.reason == "unexpected end of data" else error.start
    return None


def open_character(data: bytes) -> bytes | None:
    """Return the incomplete end of the beginning of UTF-8 text; None if `data` is no such thing."""
    return incomplete_end(data[-3:]) if invalid_start(data) is None else None
