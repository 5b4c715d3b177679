"""Console: rich's, with boxes and bars in ASCII where the locale is C."""

from __future__ import annotations

import os

import rich.console

# What Python makes of LC_CTYPE in the locale C unless LC_ALL is set (PEP 538).
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")


class Console(rich.console.Console):
    """A console whose `encoding` is that of the locale.

    In the locale C Python writes UTF-8 (PEP 540), so that no text is lost; the terminal need not be
    able to show it, and what is drawn around texts is better in ASCII there.
    """

    @property
    def encoding(self) -> str:
        """The encoding that boxes and bars are drawn for: the stream's, `ascii` in the locale C."""
        return "ascii" if is_c_locale() else super().encoding


def is_c_locale() -> bool:
    """Return whether the environment names the locale C; one that names none does not."""
    names = [os.environ.get(each, "") for each in ("LC_ALL", "LC_CTYPE", "LANG")]
    if names[1] in _COERCED:
        names[1] = ""
    return next(filter(None, names), "") in ("C", "POSIX")
