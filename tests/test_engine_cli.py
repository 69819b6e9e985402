"""`tqtool doctor` and `tqtool bench` on the real command line."""

from __future__ import annotations

import json
import os
import re

import pytest
from conftest import Run
from loops import case

from tqtool.bench.codec import CodecSpeed, FusedSpeed
from tqtool.codec.sizes import KVConfig
from tqtool.runtime import binding as runtime


def test_doctor_reports_the_engine_and_passes_its_checks(tqtool: Run) -> None:
    document = json.loads(tqtool("doctor", "--json").stdout)
    assert document["schema"] == "tqtool.doctor/1"
    assert document["engine"] == ("runtime" if runtime.available() else "reference")
    assert document["packages"]["numpy"]
    assert all(check["passed"] for check in document["checks"])
    assert len(document["checks"]) == (5 if runtime.available() else 3)


def test_doctor_says_when_the_reference_runs(tqtool: Run) -> None:
    done = tqtool("doctor", env=os.environ | {"TQTOOL_ENGINE": "reference"})
    assert done.returncode == 0, done.stderr
    assert "the NumPy reference" in done.stdout


@pytest.mark.parametrize("engine", ["runtime", "reference"])
def test_bench_measures_every_asked_row(engine: str, tqtool: Run) -> None:
    arguments = ("--dims", "64,96", "--bits", "2,8", "--tokens", "64", "--size", "1", "--rounds", "1", "--threads", "2")
    done = tqtool("bench", *arguments, "--json", env=os.environ | {"TQTOOL_ENGINE": engine})
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["run"]["codec"]
    assert {(row["operation"], row["dim"], row["bits"], row["threads"]) for row in rows} == {
        (operation, dim, bits, threads)
        for operation in ("encode", "decode")
        for dim in (64, 96)
        for bits in (2, 8)
        for threads in (1, 2)
    }
    assert all(row["of_memcpy"] > 0 for row in rows)
    fused = document["run"]["attention"]
    runs = engine == "runtime" and runtime.available()
    assert [(row["tokens"], row["group"], row["threads"]) for row in fused] == (
        [(64, 1, 1), (64, 1, 2), (64, 4, 1), (64, 4, 2)] if runs else []
    )


def test_bench_prints_fractions(tqtool: Run) -> None:
    done = tqtool("bench", "--dims", "64", "--bits", "4", "--tokens", "64", "--size", "1", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "of memcpy" in done.stdout
    assert done.stdout.startswith("engine: ")


def test_bench_shows_a_decoding_step_over_both_caches(tqtool: Run) -> None:
    arguments = ("bench", "--cache", "--tokens", "16,300", "-c", "K3/V2")
    document = json.loads(tqtool(*arguments, "--json").stdout)
    assert document["schema"] == "tqtool.bench/1"
    assert document["params"] == {"tokens": [16, 300], "config": "K3/V2", "threads": 1}
    for row, tokens in zip(document["run"]["cache"], (16, 300), strict=True):
        with case(tokens=tokens):
            assert row["packed_bytes"] == tokens * 8 * (48 + 32 + 16)
            assert row["float32_bytes"] == tokens * 8 * 1024
            assert row["agreement"] < 1e-5
            assert row["overhead"] == row["work_seconds"] / row["fused_seconds"] > 0
            assert min(row["tokens_per_second"]) > 0
            assert row["operations"]["rotate K"] == 128 * 7
    lines = tqtool(*arguments).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["tokens", "16", "300"]
    assert re.search(r"^ *attend +76,800 +100.00%$", "\n".join(lines), re.MULTILINE)


def test_fractions_are_quotients_of_times() -> None:
    speed = CodecSpeed("encode", 128, 4, 1, seconds=0.5, copy_seconds=0.1, vectors=1_000_000)
    assert speed.of_memcpy == pytest.approx(0.2)
    assert speed.gb_per_second == pytest.approx(1.024)
    assert FusedSpeed(KVConfig(4, 2), 128, 10, 8, 1, 1, 2.0, 5.0).times_numpy == 2.5


@pytest.mark.parametrize("arguments", [
    ("--dims", "90"), ("--bits", "9"), ("--bits", "0"), ("--bits", "2,2"), ("--config", "K9/V2"), ("--tokens", "0"),
    ("--cache", "--tokens", "16,0"),
])  # fmt: skip
def test_bench_refuses_what_does_not_exist(arguments: tuple[str, ...], tqtool: Run) -> None:
    done = tqtool("bench", *arguments, "--size", "1")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("tqtool: error[")


@pytest.mark.parametrize(("engine", "said"), [("reference", "the NumPy reference"), ("runtime", "engine: the ")])
def test_verbose_says_which_engine_runs(engine: str, said: str, tqtool: Run) -> None:
    done = tqtool("-v", "size", env=os.environ | {"TQTOOL_ENGINE": engine})
    assert said in done.stderr
    assert "engine" not in done.stdout
