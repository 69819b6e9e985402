"""Units of work: in order, bounded, inline where a pool would cost more than it gives, and their errors whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from loops import case

from tqtool import parallel
from tqtool.codec.codec import decode, encode
from tqtool.codec.spec import CodecSpec
from tqtool.errors import InputError, TqError
from tqtool.parallel import ordered_map


def test_an_executor_of_any_kind_serves() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(ordered_map(lambda n: n * n, range(20), executor=pool)) == [n * n for n in range(20)]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_results_come_in_the_order_of_the_items(count: int, threads: int) -> None:
    assert list(ordered_map(lambda n: n * n, range(count), threads=threads)) == [n * n for n in range(count)]


def test_items_are_drawn_only_as_there_is_room() -> None:
    drawn = []

    def items() -> Iterator[int]:
        for n in range(100):
            drawn.append(n)
            yield n

    results = ordered_map(lambda n: n, items(), threads=2)
    assert not drawn
    for n in range(10):
        with case(n=n):
            assert next(results) == n
            assert len(drawn) <= n + 4


def test_the_first_error_stops_the_work() -> None:
    begun = []

    def work(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise InputError("three", code="shape")
        return n

    done = []
    with pytest.raises(TqError, match="three"):
        done.extend(ordered_map(work, range(1000), threads=2))
    assert max(begun) < 10


@pytest.fixture
def no_new_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(self: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    parallel._helpers.cache_clear()
    yield
    parallel._helpers.cache_clear()


@pytest.mark.usefixtures("no_new_threads")
def test_one_block_needs_no_pool() -> None:
    spec = CodecSpec(64, 4)
    x = np.random.default_rng(0).standard_normal((2, 16, 64), dtype=np.float32)
    assert list(ordered_map(lambda n: n + 1, iter([1]), threads=8)) == [2]
    assert decode(encode(x, spec, threads=8), threads=8).shape == x.shape


@pytest.mark.usefixtures("no_new_threads")
def test_the_guard_above_would_notice_a_pool() -> None:
    with pytest.raises(AssertionError, match="a thread was started"):
        list(ordered_map(lambda n: n, range(2), threads=2))


def test_threads_stay_for_the_next_call_and_the_caller_works_too() -> None:
    def names() -> set[str]:
        return set(ordered_map(lambda n: time.sleep(0.01) or threading.current_thread().name, range(8), threads=3))

    first, second = names(), names()
    assert threading.current_thread().name in first & second
    assert len(first | second) == 3


def test_units_may_map_in_their_turn() -> None:
    def outer(n: int) -> int:
        return sum(ordered_map(lambda m: n * m, range(5), threads=2))

    assert list(ordered_map(outer, range(6), threads=2)) == [10 * n for n in range(6)]


def test_an_error_waits_for_what_is_under_way() -> None:
    finished = []

    def work(n: int) -> None:
        if n == 0:
            raise InputError("zero", code="shape")
        time.sleep(0.05)
        finished.append(n)

    with pytest.raises(TqError, match="zero"):
        list(ordered_map(work, range(3), threads=3))
    before = list(finished)
    time.sleep(0.1)
    assert finished == before
