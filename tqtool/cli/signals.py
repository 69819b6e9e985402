"""Signals that ask the program to end, raised as an exception, so that whatever was begun is undone on the way out."""

from __future__ import annotations

import signal
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(BaseException):
    """The program was asked to end; no `Exception`, so that nothing on the way out takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status by which a shell knows the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


def raise_when_stopped() -> None:
    """Let the signals that ask for an end raise `Stopped`, but for those that the caller has us ignore (`nohup`)."""
    for number in STOPPING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)  # a second one would stop the undoing half-way
    raise Stopped(number)
