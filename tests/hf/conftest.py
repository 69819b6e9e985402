"""Tiny models gain nothing from threads, and two test workers with two threads each fight for two cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")
    torch.set_num_threads(1)
