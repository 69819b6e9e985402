"""Cases made from public reports, run on the product: what each of them demands, and whether it holds.

python tests/slow/reported_cases.py [--numpy1 PYTHON] [CASE ...]      (CASE: rp01 …; default all)

The inputs come from ../shared/cases/reports, each with the right value; a case may be answered by that value or by a
refusal that says why. `--numpy1` is an interpreter that has this package and NumPy 1.26 (rp16); without it rp16 runs
under the NumPy at hand and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "reports"
Done = subprocess.CompletedProcess[str]
Holds = Callable[[ModuleType, Path], str]  # "" if the rule holds, else what was seen

RULES: dict[str, tuple[str, str, Holds]] = {}  # case: (kind of issue 10, rule, check)


def rule(case: str, kind: str, text: str) -> Callable[[Holds], Holds]:
    def keep(check: Holds) -> Holds:
        RULES[case] = (kind, text, check)
        return check

    return keep


def tqtool(*arguments: object, python: str = sys.executable, **options: Any) -> Done:
    command = [python, "-m", "tqtool", *map(str, arguments)]
    return subprocess.run(command, **({"capture_output": True, "text": True, "check": False, "cwd": "/"} | options))


def told(run: Done) -> str:
    lines = [line for line in run.stderr.splitlines() if "error[" in line] or run.stdout.splitlines() or [""]
    return f"exit {run.returncode}; {lines[0][:200]}"


def refused(run: Done, *codes: str) -> bool:
    """Whether the input was refused, in one line of one of these codes."""
    return run.returncode == 3 and any(f"error[{code}]" in run.stderr for code in codes)


def n_eff(run: Done) -> list[float]:
    """Effective number of attended keys by layer, of exact data."""
    layers = [each for each in json.loads(run.stdout)["layers"] if each["config"] == "K16/V16"]
    return [each["values"]["n_eff"] for each in sorted(layers, key=lambda each: each["layer"])]


def near(found: list[float], right: list[float], relative: float = 1e-3) -> bool:
    return len(found) == len(right) and bool(np.allclose(found, right, rtol=relative))


@rule("rp01", "A", "every layer is measured with its own group of query heads")
def _(case: ModuleType, folder: Path) -> str:
    for name, order in case.ORDERS.items():
        run = tqtool("validate", folder / name, "-c", "K4/V4", "--json")
        right = [case.n_eff(*kvq) for kvq in case.layers(order).values()]
        if run.returncode or not near(n_eff(run), right):
            return f"{name}: {told(run) if run.returncode else n_eff(run)}"
    return ""


@rule("rp03", "A", "a layer with fewer keys than queries does not take the mask from the others")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder, "-c", "K4/V4", "--json")
    if run.returncode:
        return "" if run.returncode == 3 else told(run)
    found, right = n_eff(run)[1], case.n_eff(*case.layers()[1], True)
    return "" if near([found], [right]) else f"layer 1: n_eff {found:.1f}, right {right:.1f}"


def sizes(case: ModuleType, folder: Path) -> str:
    wrong = []
    for name, (_, right) in case.CONFIGS.items():
        run = tqtool("size", "--model", folder / f"{name}.json", "--tokens", case.TOKENS, "-c", "K16/V16", "--json")
        if refused(run, "model-config"):
            continue
        found = json.loads(run.stdout)["rows"][0]["total_bytes"] if run.returncode == 0 else None
        if found != right:
            wrong.append(f"{name}: {told(run) if found is None else f'{found / right:.3g} times'}")
    return "; ".join(wrong)


rule("rp04", "E", "latent attention is priced as latents, or refused")(sizes)
rule("rp06", "E", "layers that slide by their family's rule are known, or refused")(sizes)
rule("rp08", "E", "hybrid models pay for their attention layers alone, or are refused")(sizes)


@rule("rp10", "H", "bfloat16 bits are taken in signed integers as in unsigned ones")
def _(case: ModuleType, folder: Path) -> str:
    contents = []
    for name in ("layer00_k", "unsigned_k"):
        run = tqtool("compress", folder / f"{name}.npy", "--dtype", "bf16", "-o", folder / f"{name}.tq.safetensors")
        if run.returncode:
            return f"{name}: {told(run)}"
        restored = folder / f"{name}.back.npy"
        back = tqtool("decompress", folder / f"{name}.tq.safetensors", "--dtype", "f32", "-o", restored)
        if back.returncode:
            return f"{name}: {told(back)}"
        contents.append(np.load(restored))
    if not np.array_equal(*contents):
        return "other codes"
    run = tqtool("compress", folder / "layer00_k.npy", "-o", folder / "x.tq.safetensors")
    return "" if run.returncode == 3 and "--dtype bf16" in run.stderr else f"no hint: {told(run)}"


@rule("rp11", "C", "empty slots of a cache are refused or named, and no gate passes on them")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder / "slots", "-c", "K3/V3", "--max", "kl=0.02", "--json")
    if run.returncode == 0:
        return "a gate passes on empty slots"
    return "" if run.returncode == 3 or "zero" in run.stderr else told(run)


@rule("rp12", "D", "axes that two readings allow are refused with both")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder, "-c", "K4/V4", "--json")
    if refused(run, "layout"):
        said = tqtool("validate", folder, "-c", "K4/V4", "--layout", "htd", "--json")
        short = refused(said, "too-short", "shape", "no-queries") or said.returncode == 0
        return "" if short else f"with --layout htd: {told(said)}"
    return told(run) if run.returncode else "read without a word"


@rule("rp13", "H", "hidden twins of files are ignored")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder, "-c", "K4/V4")
    return "" if run.returncode == 0 else told(run)


@rule("rp15", "H", "names that are no UTF-8 are shown, in every format")
def _(case: ModuleType, folder: Path) -> str:
    for form in ("json", "html", "markdown", "tsv", "junit"):
        dump = os.fsdecode(os.path.join(os.fsencode(folder), case.NAME))  # noqa: PTH118 (bytes)
        run = tqtool("validate", dump, "-c", "K4/V4", f"--{form}-out", folder / f"r.{form}")
        if run.returncode or not (folder / f"r.{form}").exists():
            return f"{form}: {told(run)}"
    return ""


@rule("rp16", "I", "bfloat16 files are served by every NumPy that is declared")
def _(case: ModuleType, folder: Path) -> str:
    python = OPTIONS.numpy1 or sys.executable
    health = tqtool("inspect", "--health", folder / "clean.safetensors", python=python)
    if health.returncode:
        return told(health)
    run = tqtool("compress", folder / "nan.safetensors", "-o", folder / "x.tq.safetensors", python=python)
    return "" if refused(run, "non-finite") and "first NaN at [0, 3, 5]" in run.stderr else told(run)


@rule("rp18", "G", "an archive of 288 members does not need as many descriptors")
def _(case: ModuleType, folder: Path) -> str:
    for command in (
        ["validate", folder / "many.npz", "-c", "K4/V4"],
        ["compress", folder / "many.npz", "-o", folder / "many.tq.safetensors"],
        ["inspect", "--health", folder / "many.npz"],
    ):
        limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", sys.executable, "-m", "tqtool", *map(str, command)]
        run = subprocess.run(limited, capture_output=True, text=True, check=False)
        if run.returncode:
            return f"{command[0]}: {told(run)}"
    return ""


@rule("rp19", "H", "one archive a layer: the file's name tells the layer")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder, "-c", "K4/V4", "--json")
    if run.returncode:
        return told(run)
    layers = json.loads(run.stdout)["sources"][0]["layers"]
    return "" if layers == [0, 1] else f"layers {layers}"


@rule("rp21", "G", "a second array in one file is not dropped in silence")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("compress", folder / "layer00_k.npy", "-o", folder / "x.tq.safetensors")
    return "" if run.returncode == 3 or "bytes" in run.stderr else told(run)


@rule("rp23", "G", "no result is made of two versions of a file")
def _(case: ModuleType, folder: Path) -> str:
    from tqtool.dumps.datafiles import open_arrays
    from tqtool.errors import InputError

    for name, after in (("layer00_k.npy", "next_k.npy"), ("cache.npz", "next.npz")):
        sources = open_arrays(folder / name)
        sources[0].box((range(1), *map(range, sources[0].shape[1:])))
        (folder / after).replace(folder / name)
        try:
            last = sources[-1].read()
        except InputError as error:
            if error.code != "changed":
                return f"{name}: {error}"
        else:
            if np.linalg.norm(np.asarray(last, np.float32)[-1], axis=-1).mean() > 100:
                return f"{name}: the new file's values"
    return ""


@rule("rp24", "H", "two reports in one step summary are both there")
def _(case: ModuleType, folder: Path) -> str:
    summary = folder / "summary.md"
    for name in "ab":
        environment = os.environ | {"GITHUB_STEP_SUMMARY": str(summary)}
        run = tqtool("validate", folder / name, "-c", "K4/V4", "--markdown-out", summary, env=environment)
        if run.returncode:
            return told(run)
    text = summary.read_text()
    return "" if all(f"{folder.name}/{name}" in text for name in "ab") else "one is missing"


@rule("rp25", "B", "a soft cap of the scores is an option and a manifest key")
def _(case: ModuleType, folder: Path) -> str:
    (folder / "manifest.json").write_text(json.dumps({"attn_logit_softcapping": case.CAP}))
    run = tqtool("validate", folder, "-c", "K4/V4", "--json")
    if run.returncode:
        return told(run)
    k, _, q = case.arrays()
    found, right = n_eff(run), [case.n_eff(k, q, case.CAP)]
    return "" if near(found, right, 5e-3) else f"n_eff {found}, right {right}"


@rule("rp27", "B", "values may be shorter than keys")
def _(case: ModuleType, folder: Path) -> str:
    run = tqtool("validate", folder, "-c", "K4/V4", "--json")
    if run.returncode:
        return told(run)
    found = next(row["pair_bytes"] for row in json.loads(run.stdout)["rows"] if row["config"] == "K4/V4")
    return "" if found == 176 else f"{found} bytes a pair, right 176"


@rule("rp28", "D", "what a name or manifest claims is held against the data")
def _(case: ModuleType, folder: Path) -> str:
    runs = {name: tqtool("validate", folder / name, "-c", "K4/V4") for name in "abc"}
    return "; ".join(f"{name}: {told(run)}" for name, run in runs.items() if run.returncode != 3)


@rule("rp29", "H", "help is the same under -OO")
def _(case: ModuleType, folder: Path) -> str:
    for arguments in (["--help"], ["validate", "--help"]):
        plain, bare = (tqtool(*arguments, env=os.environ | more) for more in ({}, {"PYTHONOPTIMIZE": "2"}))
        if plain.stdout != bare.stdout:
            return f"{' '.join(arguments)}: {len(plain.stdout)} and {len(bare.stdout)} letters"
    return ""


@rule("rp30", "H", "a working folder that is gone is no bug")
def _(case: ModuleType, folder: Path) -> str:
    wrong = []
    for command, allowed in (("compress layer00_k.npy", (3, 4)), ("gen-codebooks", (3, 4))):
        gone = folder / "gone"
        gone.mkdir()
        script = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -m tqtool {command}'
        run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        if run.returncode not in allowed:
            wrong.append(f"{command}: {told(run)}")
    return "; ".join(wrong)


@rule("rp34", "L", "SIGTERM and SIGHUP leave no temporary file")
def _(case: ModuleType, folder: Path) -> str:
    for number in (signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, "-m", "tqtool", "compress", "layer00_k.npy", "--threads", "1"]
        environment = os.environ | {"PYTHONPATH": str(folder / "site")}
        with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while not list(folder.glob(".*.tmp")) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            process.send_signal(number)
            process.communicate()
        left = [path.name for path in folder.glob(".*.tmp")]
        if left or process.returncode not in (128 + number, 0):
            return f"{number.name}: status {process.returncode}, left {left}"
        (folder / "layer00_k.tq.safetensors").unlink(missing_ok=True)
    return ""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    if not CASES.is_dir():
        print(f"{CASES} is not there")
        return 2
    found = {path.stem.partition("_")[0]: path for path in sorted(CASES.glob("rp*.py"))}
    for unknown in found.keys() - RULES.keys():
        print(f"{unknown} has no rule here")
    held = 0
    chosen = OPTIONS.cases or list(found)
    for name in chosen:
        kind, text, check = RULES[name]
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        try:
            case = load(found[name])
            case.make(folder)
            seen = check(case, folder)
        except Exception as error:  # a case that breaks the script is not held
            seen = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        held += not seen
        note = " (not run under NumPy 1: --numpy1)" if name == "rp16" and not OPTIONS.numpy1 else ""
        print(f"{kind}  {name}  {'held' if not seen else 'NOT HELD':8}  {text}{note}", flush=True)
        if seen:
            print(f"             {seen}", flush=True)
    print(f"{held} of {len(chosen)} held")
    return 0 if held == len(chosen) and found.keys() <= RULES.keys() else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numpy1", metavar="PYTHON")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    OPTIONS = parser.parse_args()
    raise SystemExit(main())
