"""Errors keep everything they say wherever they are sent: copied, pickled, back from a process pool."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from loops import case

from tqtool import errors
from tqtool.errors import InputError, TqError

CLASSES = [TqError, *TqError.__subclasses__()]
SENDINGS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    **{
        f"pickled, protocol {number}": lambda error, number=number: pickle.loads(pickle.dumps(error, number))
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


def facts(error: TqError) -> tuple[object, ...]:
    return type(error), str(error), error.args, error.code, error.hint, error.path, error.status


def test_every_class_is_there() -> None:
    there = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TqError)}
    assert there == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sending", SENDINGS)
def test_an_error_arrives_whole(kind: type[TqError], sending: str) -> None:
    for error in (kind("k.npy: bad", code="shape", hint="save it", path="k.npy"), kind("bad", code="shape")):
        with case(error=error):
            error.add_note("noted on the way")
            arrived = SENDINGS[sending](error)
            assert facts(arrived) == facts(error)
            assert arrived.__notes__ == ["noted on the way"]


def fail(number: int) -> int:
    raise InputError(f"k.npy: head {number}", code="non-finite", hint="--nan zero", path="k.npy")


def test_an_error_comes_back_from_another_process() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(InputError) as caught:
        pool.submit(fail, 3).result()
    assert facts(caught.value)[1:] == ("k.npy: head 3", ("k.npy: head 3",), "non-finite", "--nan zero", "k.npy", 3)
