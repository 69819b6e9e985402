"""Independent units of work: share nothing, run anywhere, merge in a fixed order.

Any `concurrent.futures.Executor` serves. The results come back in the order of the items, so a sum over them is the
same for any number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """Return how many threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    threads = default_threads() if threads is None else threads
    remaining = iter(items)
    begun = list(islice(remaining, 2)) if executor is None and threads > 1 else []
    items = chain(begun, remaining)
    if executor is not None:
        yield from _windowed(function, items, executor, threads + 1)
    elif threads == 1 or len(begun) < 2:
        yield from map(function, items)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from _windowed(function, items, pool, threads + 1)


def _windowed(function: Callable[[T], R], items: Iterable[T], executor: Executor, window: int) -> Iterator[R]:
    remaining = iter(items)
    pending: deque[Future[R]] = deque()
    try:
        pending.extend(executor.submit(function, item) for item in islice(remaining, window))
        while pending:
            result = pending.popleft().result()
            pending.extend(executor.submit(function, item) for item in islice(remaining, 1))
            yield result
    finally:
        for future in pending:
            future.cancel()
