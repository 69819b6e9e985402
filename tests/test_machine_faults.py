"""A part of `slow/machine_faults.py`: the first calls of every kind fail, do a part, or are met by a signal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
from machine_faults import KINDS, OF_OUTPUTS, SCENARIOS, Fault, Machine, faults_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="the calls are caught by a library that a C compiler makes, before glibc",
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.close()


def wrong(machine: Machine, name: str, faults: Iterator[Fault], way: str = "unnamed") -> list[str]:
    machine.truth(name)
    found = []
    for fault in faults:
        answer = machine.run(SCENARIOS[name], fault, way)
        if what := machine.judge(name, fault, answer):
            found.append(f"{fault} at {answer.hit}: {what}\n{answer.err}")
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_call_of_every_kind_fails(name: str, machine: Machine) -> None:
    machine.truth(name)
    counts = machine.run(SCENARIOS[name]).counts
    assert wrong(machine, name, faults_of(counts, ["EIO"], [], most=1)) == []


@pytest.mark.parametrize("way", ["named", "no links"])
@pytest.mark.parametrize("name", ["compress", "compress --force"])
def test_nothing_is_left_where_temporaries_have_names(name: str, way: str, machine: Machine) -> None:
    machine.truth(name)
    counts = machine.run(SCENARIOS[name], way=way).counts
    counts = {kind: counts[kind] for kind in OF_OUTPUTS if kind not in ("write", "pwrite", "close")}
    assert wrong(machine, name, faults_of(counts, ["EIO"], ["SIGHUP"]), way) == []


def test_the_shim_is_what_stands_between(machine: Machine) -> None:
    """The cases above would all pass if no call were counted."""
    counts = machine.run(SCENARIOS["compress --force"]).counts
    assert {kind for kind in KINDS if counts[kind]} >= {
        "open", "read", "pread", "pwrite", "lseek", "stat", "close", "fsync", "truncate", "link", "rename", "space"
    }  # fmt: skip
    answer = machine.run(SCENARIOS["compress"], Fault("read", 0, "EIO"))
    assert answer.hit.endswith("/in/k.npy")
    assert (answer.status, "k.npy: Input/output error" in answer.err) == (3, True)


def test_threads_change_nothing(machine: Machine) -> None:
    machine.truth("compress npz")
    fault = Fault("pwrite", 3, "ENOSPC")
    answer = machine.run(SCENARIOS["compress npz"], fault, threads=3)
    assert machine.judge("compress npz", fault, answer) == ""
    assert "No space left on device" in answer.err
