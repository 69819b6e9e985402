"""Independent units of work: share nothing, run anywhere, merge in a fixed order.

Any `concurrent.futures.Executor` serves. The results come back in the order of the items, so a sum over them is the
same for any number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import chain, islice
from typing import TypeVar

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """Return how many threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_blas_threads() -> None:
    """Give BLAS one thread: our own units use every core, and its split of a product could round differently.

    The variables are read when NumPy is first loaded: call it before that.
    """
    for variable in BLAS_VARIABLES:
        os.environ.setdefault(variable, "1")


def ordered_map(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int | None = None,
    executor: Executor | None = None,
) -> Iterator[R]:
    """Yield `function(item)` for each item, in order.

    At most `threads + 1` items are under way or waiting to be taken, and items are drawn only as there is room, so
    memory stays bounded however many there are. One thread, or one item, means a plain loop: starting a pool costs
    more than a small block. The first error is raised where its result would have come, and what has not begun by
    then never does.
    """
    if executor is not None:
        window = (default_threads() if threads is None else threads) + 1
        yield from _windowed(function, items, executor, window, helping=False)
        return
    threads = default_threads() if threads is None else threads
    remaining = iter(items)
    begun = list(islice(remaining, 2)) if threads > 1 else []
    items = chain(begun, remaining)
    if len(begun) < 2:
        yield from map(function, items)
    else:
        yield from _windowed(function, items, _helpers(threads - 1), threads + 1, helping=True)


@cache
def _helpers(count: int) -> Executor:
    """Return threads that stay: starting them costs more than a step of attention."""
    return ThreadPoolExecutor(count)


def _windowed(
    function: Callable[[T], R], items: Iterable[T], executor: Executor, window: int, *, helping: bool
) -> Iterator[R]:
    """`helping`: the caller's thread does what no other has begun, instead of waiting for the next result.

    So it never stands still, and units that map in their turn cannot wait for each other.
    """
    remaining = iter(items)
    pending: deque[tuple[Future[R], T]] = deque()
    try:
        pending.extend((executor.submit(function, item), item) for item in islice(remaining, window))
        while pending:
            while helping and not pending[0][0].done():
                place = next((i for i, (future, _) in enumerate(pending) if future.cancel()), None)
                if place is None:
                    break
                pending[place] = (_done(function, pending[place][1]), pending[place][1])
            result = pending.popleft()[0].result()
            pending.extend((executor.submit(function, item), item) for item in islice(remaining, 1))
            yield result
    finally:
        running = [future for future, _ in pending if not future.cancel()]
        wait(running)  # they may write to what the caller is about to close


def _done(function: Callable[[T], R], item: T) -> Future[R]:
    future: Future[R] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:
        future.set_exception(error)
    return future
