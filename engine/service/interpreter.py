"""Sets up the Python that Triton's stub embeds: UTF-8 and a valid working directory.

The stub isolates its interpreter: that reads neither the locale nor PYTHONUTF8, and takes names of
files, and the environment, for ASCII.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import locale
import os
import sys
from typing import Any

import engine

_ESCAPE = "surrogateescape"
_BUILT_IN = codecs.lookup_error(_ESCAPE)


def adapt() -> None:
    """Use UTF-8, and the working directory of the parent process, which is tritonserver.

    It is for the whole process, and to be called before anything is read that a user has named.
    """
    if sys.getfilesystemencoding() != "utf-8":
        _use_utf8()
    # The launcher starts a stub in an empty directory, for a stub imports from where it starts.
    with contextlib.suppress(OSError):
        os.chdir(f"/proc/{os.getppid()}/cwd")


def _use_utf8() -> None:
    """Make names of files, variables, the log and text files UTF-8.

    The encoding of the file system cannot be changed, but its error handler can be replaced: it is
    asked for the bytes of each character that is not ASCII. What the system returns, such as the
    names in a directory, is decoded as before; in that form, too, the names can be used.
    """
    codecs.register_error(_ESCAPE, _utf8)
    for folders in (sys.path, engine.__path__):  # of modules that name their own folder
        folders[:] = [_decoded(os.fsencode(each)) for each in folders]
    # What becomes a part of other names; a GGUF file is known by its whole name, for one.
    os.getcwd = lambda: _decoded(os.getcwdb())
    variables: Any = os.environ  # whose type declares that it decodes strings
    variables.decodekey = variables.decodevalue = _decoded
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # of `open` without an encoding
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")


def _utf8(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode as UTF-8 what ASCII cannot; else do what Python's own error handler does."""
    if isinstance(error, UnicodeEncodeError) and error.encoding == "ascii":
        return error.object[error.start : error.end].encode("utf-8", _ESCAPE), error.end
    return _BUILT_IN(error)


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", _ESCAPE)
