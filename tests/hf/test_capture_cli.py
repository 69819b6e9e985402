"""`tqtool capture` as a user runs it: folders, messages, statuses, and `validate` on what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import TEXT, save_tiny  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> str:
    save_tiny(tmp_path / "tiny", "MistralConfig", sliding_window=48)
    (tmp_path / "a.txt").write_text(TEXT[:200])
    (tmp_path / "b.txt").write_text(TEXT[200:400])
    return "tiny"


def test_from_a_model_to_a_verdict(model: str, tqtool: Run, tmp_path: Path) -> None:
    done = tqtool("capture", model, "--text", "a.txt", "-o", "dump/", "--queries", 64, "--chunk", 60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "dump: 3 of 3 layers, 200 tokens, queries of the last 64, 199 KiB",
        "  layers 0-2: sliding, window 48: 4 query / 2 KV heads of 16, scale 0.25",
    ]
    assert done.stderr.splitlines() == ["tqtool: tiny: 199 KiB for 200 tokens"]
    report = json.loads(tqtool("validate", "dump", "-c", "K4/V4", "--json").stdout)
    (source,) = report["sources"]
    assert (source["model"], source["model_layers"]) == ("tiny", 3)
    assert {facts["window"] for facts in source["layer_facts"]} == {48}


def test_several_texts_get_a_folder_each_and_a_dry_run_tells_them(model: str, tqtool: Run, tmp_path: Path) -> None:
    arguments = ["capture", model, "--text", "a.txt", "b.txt", "-o", "dumps", "--layers", "0,-1", "--dtype", "f16"]
    planned = tqtool(*arguments, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    assert not (tmp_path / "dumps").exists()
    done = tqtool(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    plan, found = json.loads(planned.stdout), json.loads(done.stdout)
    assert [each["path"] for each in found["dumps"]] == ["dumps/a", "dumps/b"]
    assert (plan["dry_run"], found["dry_run"]) == (True, False)
    assert plan["dumps"] == found["dumps"]  # what the first tokens showed was right
    for name in ("a", "b"):
        with case(name=name):
            files = sorted(path.name for path in (tmp_path / "dumps" / name).iterdir())
            assert files == sorted([f"layer{n:02d}_{side}.npy" for n in (0, 2) for side in "kvq"] + ["manifest.json"])
            assert np.load(tmp_path / "dumps" / name / "layer02_k.npy").dtype == np.float16
    assert not (np.load(tmp_path / "dumps/a/layer00_k.npy") == np.load(tmp_path / "dumps/b/layer00_k.npy")).all()


def test_what_is_left_out_is_told(model: str, tqtool: Run) -> None:
    done = tqtool("capture", model, "--text", "a.txt", "-o", "dump", "--max-tokens", 40)
    assert done.stderr.splitlines()[:2] == [
        "tqtool: a.txt: the last 160 of 200 tokens are left out",
        "tqtool: a.txt: 40 tokens never reach past the window of 48",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["tiny", "--text", "no.txt", "-o", "d"], 3, "error[not-found]: no.txt: no such file"),
        (["tiny", "--text", "a.txt", "-o", "tiny"], 4, "error[exists]: tiny: already exists"),
        (["tiny", "--text", "a.txt", "-o", "x/d"], 4, "error[write]: x/d: no such directory: x"),
        (
            ["who/what", "--offline", "--text", "a.txt", "-o", "d"],
            3,
            "error[not-found]: who/what: no folder of this name, and --offline: it is not in the local cache",
        ),
        (
            ["tiny", "--text", "a.txt", "-o", "d", "--layers", "3"],
            2,
            "error[usage]: --layers '3': there are layers 0 to 2",
        ),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    arguments: list[str], status: int, message: str, model: str, tqtool: Run, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = tqtool("capture", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.splitlines()[0] == f"tqtool: {message}"
    assert all(line.startswith("  hint: ") for line in done.stderr.splitlines()[1:])
    assert sorted(tmp_path.rglob("*")) == before


def test_no_hub_in_reach_is_one_line(tqtool: Run, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the library refuses at once what a dead network refuses after retries
    done = tqtool("capture", "who/what", "--text", "a.txt", "-o", "d")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == (
        "tqtool: error[not-found]: who/what: no folder of this name, and the hub cannot be reached"
    )
