"""State of UTF-8 text that arrives byte by byte: complete, incomplete or invalid."""

from __future__ import annotations


def is_continuation(byte: int) -> bool:
    """Whether `byte` is a UTF-8 continuation byte."""
    return byte & 0xC0 == 0x80


def incomplete_end(tail: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end of UTF-8 text; empty if none."""
    if tail[-1:].isascii():
        return b""
    for length in range(1, min(3, len(tail)) + 1):
        if not is_continuation(tail[-length]):
            try:
                tail[-length:].decode("utf-8")
            except UnicodeDecodeError as error:
                return tail[-length:] if error.reason == "unexpected end of data" else b""
            break
    return b""


def invalid_start(data: bytes | bytearray) -> int | None:
    """Return the index of the first invalid byte; None if `data` is a prefix of valid UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return None if error.reason == "unexpected end of data" else error.start
    return None


def open_character(data: bytes) -> bytes | None:
    """Return the incomplete character at the end of `data`; None if `data` is invalid UTF-8."""
    return incomplete_end(data[-3:]) if invalid_start(data) is None else None


def decode_complete(data: bytes) -> tuple[str, bytes]:
    """Return the text of `data` without an incomplete character at its end, and that character.

    Not `codecs.utf_8_decode`, which also waits for the third byte of a surrogate, and then refuses
    it.
    """
    tail = incomplete_end(data[-3:])
    return data[: len(data) - len(tail)].decode("utf-8", "replace"), tail
