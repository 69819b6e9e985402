"""Assertions in a loop that say which case failed; `tests/test_loops.py` holds every test to it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


@contextmanager
def case(**facts: object) -> Iterator[None]:
    """Add what tells one pass of a loop from the others to any error that leaves the block."""
    try:
        yield
    except Exception as error:
        error.add_note("case: " + ", ".join(f"{name} = {_said(value)}" for name, value in facts.items()))
        raise


def _said(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {np.array2string(value.reshape(-1), threshold=4, edgeitems=2)}"
    return _short.repr(value)
