"""`tqtool validate` as users meet it: a subprocess, its streams, its exit statuses."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from loops import case

from tqtool.cli.app import app
from tqtool.cli.options import parse_layers
from tqtool.cli.validate import reproduce
from tqtool.errors import TqError, UsageError

Here = Callable[..., "tuple[int, dict[str, Any]]"]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two layers of a small dump with structure: sharp attention, a common key vector, 600 queries a layer."""
    rng = np.random.default_rng(11)
    folder = tmp_path / "dump"
    folder.mkdir()
    for layer in (0, 5):
        k, v = rng.standard_normal((2, 2, 150, 64))
        q = 1.5 * rng.standard_normal((4, 150, 64))
        for name, x in (("q", q), ("k", k + 0.3), ("v", v * rng.uniform(0.3, 2, (2, 150, 1)))):
            np.save(folder / f"layer{layer:02d}_{name}.npy", x.astype(np.float16))
    return folder


def answer(tqtool: Run, *arguments: object, **options: Any) -> dict[str, Any]:
    result = tqtool("validate", *arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def here(dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run `validate` in this process, which saves loading everything again: (status, its JSON)."""
    monkeypatch.chdir(dump.parent)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["tqtool", "validate", *arguments])
        status = app(["validate", *arguments, "--json"], standalone_mode=False) or 0
        return status, json.loads(capsys.readouterr().out)

    return run


def test_without_arguments_the_sample_and_the_specifications_sets_are_shown(tqtool: Run) -> None:
    begun = time.monotonic()
    result = tqtool("validate")
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - begun < 60  # 2 s on a quiet machine; the promise is 10
    assert result.stderr == ""
    assert "sample" in result.stdout
    assert "2 of 30 layers × 3 KV heads × 1,024 tokens" in result.stdout
    table = result.stdout.split("specification's table")[1].splitlines()[2:8]
    lines = {line.split()[0]: line.split()[1:] for line in table}
    # for both sets the specification's figure, theory where there is one, ours
    assert lines["K4/V2"] == ["~0.94", "0.9359", "0.9368", "~0.975", "0.9767"]


def test_a_folder_gives_a_row_per_configuration_and_one_control(here: Here) -> None:
    _, found = here("dump", "-c", "k4v2,K3V3,K4/V2")
    assert [row["config"] for row in found["rows"]] == ["K16/V16", "K4/V2", "K3/V3"]
    assert found["schema"] == "tqtool.validate/1"
    source = found["sources"][0]
    assert (source["layers"], source["kv_heads"], source["query_heads"]) == ([0, 5], 2, 4)
    assert source["causal"] is True
    assert [Path(i["path"]).name for i in found["inputs"]][:2] == ["layer00_k.npy", "layer00_q.npy"] or found["inputs"]
    assert all(len(i["sha256"]) == 64 for i in found["inputs"])
    assert found["rows"][1]["metrics"]["kl"]["worst_head"].startswith(("L00.H", "L05.H"))


def test_separate_files_give_the_same_figures_as_the_folder(here: Here, dump: Path) -> None:
    for name in ("q", "k", "v"):
        (dump / f"layer05_{name}.npy").unlink()
    parts = [part for n in ("k", "v", "q") for part in (f"--{n}", f"dump/layer00_{n}.npy")]
    (_, one), (_, other) = here(*parts, "-c", "K3/V2"), here("dump", "-c", "K3/V2")
    assert one["rows"][1]["metrics"] == other["rows"][1]["metrics"]


def test_runs_and_thread_counts_give_the_same_bytes(tqtool: Run, dump: Path) -> None:
    texts = set()
    for threads, extra in (("1", {}), ("3", {"OPENBLAS_NUM_THREADS": "2"})):
        options = {"env": os.environ | extra}
        found = answer(tqtool, "dump", "--threads", threads, "-c", "K4/V4,K2/V2", "--seeds", "0,7", **options)
        found.pop("run")
        texts.add(json.dumps(found))
    assert len(texts) == 1


def test_the_command_in_the_report_repeats_it(here: Here) -> None:
    _, first = here("dump", "-c", "K3/V3", "--center-keys", "--json-out", "x.json")
    assert first["command"] == "tqtool validate dump -c K3/V3 --center-keys"
    _, again = here(*shlex.split(first["command"])[2:])
    assert again["rows"] == first["rows"]


def test_a_gate_that_holds_exits_0_and_one_that_fails_exits_1_with_the_place(tqtool: Run, dump: Path) -> None:
    good = tqtool("validate", "dump", "-c", "K8/V8", "--gate", "balanced")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "Gate balanced: PASS" in good.stdout
    bad = tqtool("validate", "dump", "-c", "K8/V8,K2/V2", "--gate", "balanced", "--junit-out", "q.xml")
    assert bad.returncode == 1
    last = bad.stdout.strip().splitlines()[-1]
    assert "FAIL dump K2/V2" in last
    assert "(worst L0" in last
    assert "<failure" in (dump.parent / "q.xml").read_text()


def test_single_limits_and_a_gate_file_are_gates_too(here: Here) -> None:
    Path("gate.toml").write_text("[max]\nkl = 1e-9\n")
    assert here("dump", "-c", "K4/V4", "--min", "cos=0.5")[0] == 0
    assert here("dump", "-c", "K4/V4", "--max", "kl=1e-9")[0] == 1
    status, failed = here("dump", "-c", "K4/V4", "--gate-config", "gate.toml")
    assert status == 1
    assert failed["gate"]["name"] == "gate.toml"
    assert [c["metric"] for c in failed["gate"]["checks"]] == ["kl"]
    assert failed["rows"][1]["status"] == "fail"


def test_a_baseline_report_gates_the_next_run(here: Here) -> None:
    assert here("dump", "-c", "K4/V4", "--json-out", "before.json")[0] == 0
    assert here("dump", "-c", "K4/V4", "--baseline", "before.json", "--max-regress", "0")[0] == 0
    status, worse = here("dump", "-c", "K4/V4", "--baseline", "before.json", "--scale-rule", "norm")
    assert status == 1
    assert "baseline" in worse["gate"]["name"]
    with pytest.raises(TqError, match=r"none\.json: no such file"):
        here("dump", "-c", "K4/V4", "--baseline", "none.json")


def test_a_gate_without_queries_is_refused_and_no_gate_is_unverified(tqtool: Run, dump: Path) -> None:
    files = ("--k", "dump/layer00_k.npy", "--v", "dump/layer00_v.npy")
    refused = tqtool("validate", *files, "--gate", "lenient")
    assert refused.returncode == 3
    assert "error[no-queries]" in refused.stderr
    shown = tqtool("validate", *files)
    assert shown.returncode == 0
    assert "UNVERIFIED" in shown.stdout


def test_nothing_quantized_exits_1(here: Here) -> None:
    status, found = here("dump", "-c", "K4/V4", "--protect-layers", "0,5")
    assert status == 1
    assert "nothing was quantized" in found["gate"]["summary"]


@pytest.mark.parametrize("gate", [(), ("--gate", "strict"), ("--junit-out", "q.xml")])
def test_a_run_of_nothing_but_the_control_is_not_green(here: Here, gate: tuple[str, ...]) -> None:
    status, found = here("dump", "-c", "K16/V16", *gate)
    assert status == 1
    assert "K16/V16: not-engaged: bit-identical to the reference; nothing was quantized" in found["gate"]["summary"]
    assert found["next"] == "" or "K16" not in found["next"]
    if "q.xml" in gate:
        assert 'errors="1"' in Path("q.xml").read_text()
    assert here("dump", "-c", "K16/V16,K8/V8")[0] == 0


def test_a_budget_that_no_bits_meet_is_a_no(
    here: Here, dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("dump", "-c", "K4/V4", "--budget", "0.1")[0] == 1
    monkeypatch.setattr("sys.argv", ["tqtool", "validate"])
    assert app(["validate", "dump", "-c", "K4/V4", "--budget", "0.1"], standalone_mode=False) == 1
    shown = capsys.readouterr()
    assert "no bits meet at most 0.1 bits per value: not reachable (the smallest choice stores" in shown.err
    assert "at most 0.1 bits per value: not reachable" in shown.out


@pytest.mark.parametrize("layout", ["htd", "thd"])
def test_arrays_without_values_are_refused(here: Here, layout: str) -> None:
    np.save("zero.npy", np.zeros((2, 0, 64), np.float32))
    with pytest.raises(TqError, match=r"^zero.npy: layer 0: k is \(.*0.*\), which holds no values$") as caught:
        here("--k", "zero.npy", "--v", "zero.npy", "--layout", layout)
    assert (caught.value.status, caught.value.code) == (3, "shape")


def test_values_beyond_float32_are_refused_without_a_warning(tqtool: Run, dump: Path) -> None:
    k = np.load(dump / "layer00_k.npy").astype(np.float64)
    k[1, 3] *= 1e60
    np.save(dump / "layer00_k.npy", k)
    done = tqtool("validate", "dump", "-q")
    assert done.returncode == 3
    assert done.stderr.startswith("tqtool: error[norm-range]: dump/layer00_k.npy: vector [1, 3] has norm")
    assert done.stderr.endswith("hint: rescale the data\n")


def test_the_data_line_counts_one_layer(tqtool: Run, dump: Path) -> None:
    done = tqtool("validate", "--k", "dump/layer00_k.npy", "--v", "dump/layer00_v.npy", "-c", "K4/V4")
    assert "keys, values of 1 layer, axes htd" in done.stderr


def test_baselines_stand_in_the_same_table_at_their_exact_size(here: Here) -> None:
    rows = {row["config"]: row for row in here("dump", "-c", "K4/V4", "--engines")[1]["rows"]}
    sizes = {"fp16": 256, "q8_0": 136, "q4_0": 72, "q4_0+H": 72, "fp8_e4m3": 128, "turboquant_4bit_nc": 70}
    for name, size in sizes.items():
        assert rows[name]["pair_bytes"] == size, name
    assert rows["K4/V4"]["pair_bytes"] == 80
    assert rows["q8_0"]["metrics"]["kl"]["mean"] < rows["q4_0"]["metrics"]["kl"]["mean"]
    assert rows["fp16"]["metrics"]["kl"]["mean"] < 1e-12  # the dump is float16


def test_the_old_name_of_engines_still_works_and_is_no_longer_told(here: Here, tqtool: Run) -> None:
    old, new = (here("dump", "-c", "K4/V4", "--max-queries", "8", option)[1] for option in ("--baselines", "--engines"))
    assert old["rows"] == new["rows"]
    assert "--baselines" not in tqtool("validate", "--help").stdout


def test_a_recommendation_keeps_its_budget_or_meets_its_target(here: Here) -> None:
    (rec,) = here("dump", "-c", "K4/V4", "--budget", "4")[1]["recommendations"]
    assert rec["bits_per_value"] <= 4
    assert [choice["layer"] for choice in rec["layers"]] == [0, 5]
    (rec,) = here("dump", "-c", "K4/V4", "--recommend", "--target-kl", "0.02")[1]["recommendations"]
    assert rec["kl"] <= 0.02
    assert rec["feasible"]


@pytest.mark.parametrize(
    ("arguments", "status", "code", "words"),
    [
        (("nowhere",), 3, "not-found", "nowhere: no such file"),
        (("dump", "-c", "K9/V2"), 2, "usage", "9 bits"),
        (("dump", "-c", "4,2"), 2, "usage", "not of the form K4/V2"),
        (("dump", "--seeds", "a"), 2, "usage", "--seeds 'a'"),
        (("dump", "--seeds", "0,0"), 2, "usage", "--seeds '0,0': a number stands there twice"),
        (("dump", "--max-regress", "0.1"), 2, "usage", "--max-regress has no meaning without --baseline"),
        (
            ("dump", "--protect-layers", "first3"),
            2,
            "usage",
            "--protect-layers 'first3': more than all layers; there are 0, 5",
        ),
        (("dump", "--seeds", "99999999999999999999999"), 2, "usage", "is above 18446744073709551615"),
        (("dump", "--seeds", "18446744073709551616"), 2, "usage", "is above 18446744073709551615"),
        (("dump", "--scale-rule", "best"), 2, "usage", "match, norm, lsq, unbiased"),
        (("dump", "--scale-rule", "match,norm,lsq"), 2, "usage", "one or two"),
        (("dump", "--protect-layers", "9"), 2, "usage", "no such layer; there are 0, 5"),
        (("dump", "--protect-layers", "x"), 2, "usage", "first2"),
        (("dump", "--min", "cosine=1"), 2, "usage", "no metric 'cosine'"),
        (("dump", "--budget", "3", "--target-kl", "0.1"), 2, "usage", "contradict"),
        (("dump", "--attention-scale", "-1"), 2, "usage", "above 0"),
        (("dump", "--attention-scale", "nan"), 2, "usage", "above 0"),
        (("dump", "--no-causal", "--window", "8"), 2, "usage", "a window needs a causal mask"),
        (("--synthetic", "real"), 2, "usage", "gaussian, correlated"),
        (("--synthetic", ""), 2, "usage", "names no set"),
        (("dump", "--config", ","), 2, "usage", "names no configuration"),
        (("--k", "dump/layer00_k.npy"), 2, "usage", "need both keys and values"),
        (("dump", "--json", "--format", "tsv"), 2, "usage", "--json contradicts"),
        (("dump", "--gate-config", "none.toml"), 3, "gate-config", "cannot be read"),
        (("--k", "dump/layer00_k.npy", "--v", "dump/layer00_q.npy"), 3, "shape-mismatch", "k is"),
    ],
)
def test_mistakes_are_one_line_with_their_code(
    dump: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int, code: str, words: str
) -> None:
    monkeypatch.chdir(dump.parent)
    with pytest.raises(TqError) as caught:  # `test_cli.py` shows how the boundary prints it
        app(["validate", *arguments], standalone_mode=False)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert words in f"{caught.value} {caught.value.hint}"
    assert "\n" not in str(caught.value)


def test_a_mistake_is_told_before_any_work(tqtool: Run, dump: Path) -> None:
    result = tqtool("validate", "dump", "--json", "--format", "tsv")
    assert result.returncode == 2
    assert result.stderr == "tqtool: error[usage]: --json contradicts --format tsv\n"


def test_values_that_are_not_finite_are_placed(here: Here, dump: Path) -> None:
    k = np.load(dump / "layer05_k.npy")
    k[1, 17, 5] = np.nan
    np.save(dump / "layer05_k.npy", k)
    with pytest.raises(TqError, match=r"^dump/layer05_k.npy: 1 NaN; first NaN at \[1, 17, 5\]$") as caught:
        here("dump")
    assert (caught.value.status, caught.value.code) == (3, "non-finite")


def test_a_name_that_is_not_utf8_is_spelled_out(tqtool: Run, dump: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).symlink_to(dump)
    outputs = [f"--{form}-out=r.{form}" for form in ("json", "markdown", "html", "tsv", "junit")]
    done = tqtool("validate", name, "-c", "K4/V4", "--max-queries", "8", *outputs)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert report["inputs"][0]["path"].endswith("caf\\xe9/layer00_k.npy")
    assert [source["name"] for source in report["sources"]] == ["caf\\xe9"]
    for form in ("markdown", "html", "tsv", "junit"):
        assert "xe9" in (tmp_path / f"r.{form}").read_text("utf-8"), form
    assert tqtool("report", "r.json").returncode == 0


def test_layers_are_named_by_number_range_or_end() -> None:
    layers = [0, 1, 10, 20, 29]
    assert parse_layers("", layers) == ()
    assert parse_layers("first2, last1", layers) == (0, 1, 29)
    assert parse_layers("1-20", layers) == (1, 10, 20)
    assert parse_layers("last5", layers) == tuple(layers)
    for wrong in ("3-1", "last9"):
        with case(wrong=wrong), pytest.raises(UsageError):
            parse_layers(wrong, layers)


def test_the_repeated_command_leaves_out_what_changes_no_number() -> None:
    shown = ["--threads", "2", "--json-out=x", "--html-out", "y", "-f", "--color=never"]
    assert reproduce(["validate", "a b", *shown, "--window", "9"]) == "tqtool validate 'a b' --window 9"


def test_every_option_is_in_the_help(tqtool: Run) -> None:
    text = tqtool("validate", "--help", env=os.environ | {"COLUMNS": "200"}).stdout
    options = (
        "--k --v --q --synthetic --config --causal --no-causal --attention-scale --window --seeds --max-queries "
        "--center-keys --center-values --protect-layers --residual-window --sink-tokens --scale-rule --meta --law "
        "--engines --recommend --budget --target-kl --gate --gate-config --min --max --baseline --max-regress "
        "--format --json --json-out --markdown-out --html-out --junit-out --tsv-out"
    )
    assert [option for option in options.split() if option not in text] == []
