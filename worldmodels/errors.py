"""The one error of ours: something the user can mend."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What was received, what was expected and what to do, in one line; commands print it and exit with code 2."""


def printable(text: str) -> str:
    """A text without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return (str(error) or repr(error)).splitlines()[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error line about an unknown name: the nearest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known[:40])}{' ...' if len(known) > 40 else ''}" if known else "there is none to choose"
