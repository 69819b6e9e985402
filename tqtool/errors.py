"""The user's mistakes and the world's: one exception type a kind of exit status.

`str(error)` is the text that follows `tqtool: error[CODE]: ` on the terminal; it begins with the file's name where
there is one. The codes are listed in `docs/errors.md`. A broken invariant of our own is an `assert`, never a `TqError`.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar


class TqError(Exception):
    """Something a user can act on: a stable `code`, one line of text, and what to do about it."""

    status: ClassVar[int] = 70

    def __init__(self, message: str, *, code: str, hint: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        # `Exception` would call the constructor with the message alone; a process pool would break on the way back
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(TqError):
    """Options that contradict each other or have no meaning together."""

    status = 2


class InputError(TqError):
    """Data that cannot be used: missing, unreadable, of the wrong type or shape, not finite, ambiguous."""

    status = 3


class OutputError(TqError):
    """A result that cannot be written: it exists, the folder is missing, the disk is full."""

    status = 4


class IntegrityError(TqError):
    """A file of our own format that is damaged, cut short or from a newer version."""

    status = 5


class SetupError(TqError):
    """A missing optional dependency, or too little memory for the plan."""

    status = 6


class BugError(TqError):
    """A check of our own results failed: the answer cannot be trusted, and it is not the user's fault."""

    status = 70
