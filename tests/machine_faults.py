"""Faults of the machine, put into the n-th system call of a kind, and what must hold whatever fails.

A server process is started once with `failing_calls.c` loaded before the C library; each case is a fork of it, armed
after the fork, in a folder of its own. Only calls on files in that folder count, so the numbers do not depend on what
Python does besides. The suite runs a part (`test_machine_faults.py`), `slow/machine_faults.py` all of it.

What must hold: the name of an output holds the old file, the whole new one or nothing; inputs are untouched; no other
file is left, in the folder or in TMPDIR; one line on stderr (and its hint) that names the file; the status of an input
or output error, or that of the signal; and exit 0 only with the right output.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tqtool.export.package import export_files

HERE = Path(__file__).resolve().parent
KINDS = (
    "open", "read", "pread", "write", "pwrite", "lseek", "stat", "close", "fsync", "truncate", "link", "rename",
    "unlink", "owner", "space", "mkdir", "list",
)  # fmt: skip
FAIL, SHORT, SIGNAL = 1, 2, 3
ERRORS = ("EIO", "ENOSPC", "EINTR", "EMFILE", "EACCES")
SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
COUNTED = ("read", "pread", "write", "pwrite")  # calls that may do a part
WAYS = ("unnamed", "named", "no links")  # how an output gets its name here
OF_OUTPUTS = ("open", "write", "pwrite", "close", "fsync", "truncate", "link", "rename", "unlink", "owner")


@dataclass(frozen=True)
class Fault:
    """The `at`-th call (from 0; -1: every call) of a kind, and what happens to it."""

    kind: str
    at: int
    what: str  # an error's name, "short" or a signal's name

    def armed(self) -> tuple[int, int, int, int]:
        kind = KINDS.index(self.kind)
        if self.what == "short":
            return kind, self.at, SHORT, 0
        if self.what in SIGNALS:
            return kind, self.at, SIGNAL, int(getattr(signal, self.what))
        return kind, self.at, FAIL, int(getattr(errno, self.what))


@dataclass(frozen=True)
class Answer:
    """What a run came to: `hit` is the path of the call that met the fault, "" if none did."""

    status: int
    out: str
    err: str
    hit: str
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A command, on files whose names are relative to the folder."""

    command: tuple[str, ...]  # words that begin with @ are files: "@k.npy"
    outputs: tuple[str, ...]
    old: bool = False  # outputs exist before, of mode 0600

    def arguments(self, folder: Path) -> list[str]:
        return [str(folder / word[1:]) if word.startswith("@") else word for word in self.command]


SCENARIOS = {
    "compress": Scenario(("compress", "@in/k.npy", "-o", "@out/k.tq.safetensors"), ("k.tq.safetensors",)),
    "compress --force": Scenario(
        ("compress", "@in/k.npy", "-o", "@out/k.tq.safetensors", "--force"), ("k.tq.safetensors",), old=True
    ),
    "compress npz": Scenario(("compress", "@in/kv.npz", "-o", "@out/kv.tq.safetensors"), ("kv.tq.safetensors",)),
    "compress folder": Scenario(
        ("compress", "@in/dump", "-o", "@out/"), ("layer00_k.tq.safetensors", "layer00_v.tq.safetensors")
    ),
    "compress stdin": Scenario(("compress", "-", "-o", "@out/k.tq.safetensors"), ("k.tq.safetensors",)),
    "compress to stdout": Scenario(("compress", "@in/k.npy", "-o", "-"), ()),
    "decompress": Scenario(("decompress", "@in/k.tq.safetensors", "-o", "@out/k.npy"), ("k.npy",)),
    "decompress npz": Scenario(("decompress", "@in/kv.tq.safetensors", "-o", "@out/kv.npz"), ("kv.npz",)),
    "decompress --force": Scenario(
        ("decompress", "@in/kv.tq.safetensors", "-o", "@out/kv.safetensors", "--force"), ("kv.safetensors",), old=True
    ),
    "validate": Scenario(
        ("validate", "@in/dump", "-c", "K4/V2", "--json-out", "@out/r.json", "--gate-config", "@in/gate.toml"),
        ("r.json",),
    ),
    "validate npz": Scenario(
        ("validate", "@in/qkv.npz", "-c", "K4/V2", "--tsv-out", "@out/r.tsv", "--force"), ("r.tsv",), old=True
    ),
    "report": Scenario(("report", "@in/report.json", "--html-out", "@out/r.html"), ("r.html",)),
    "gen-codebooks": Scenario(("gen-codebooks", "--dims", "64", "--bits", "2,4", "-o", "@out/tq.h"), ("tq.h",)),
    "export-c": Scenario(
        ("export-c", "@out/engine", "--dims", "64", "--bits", "2"),
        tuple(f"engine/{name}" for name in export_files((64,), (2,))),
    ),
    "inspect": Scenario(("inspect", "@in/k.tq.safetensors", "--verify"), ()),
    "inspect --health": Scenario(("inspect", "@in/kv.npz", "--health"), ()),
    "check-codebooks": Scenario(("check-codebooks", "@in/levels.npy", "--dim", "64", "--tolerance", "1"), ()),
    "size": Scenario(("size", "--model", "@in/config.json"), ()),
}  # fmt: skip


class Machine:
    """The server, and a folder whose files are what every case begins with."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        self.work = self.root / "work"
        self.library = self.root / "failing_calls.so"
        source = HERE / "failing_calls.c"
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", self.library, source, "-ldl"]
        subprocess.run(command, check=True)
        self._make_inputs(self.root / "template")
        environment = os.environ | {"LD_PRELOAD": str(self.library), "TMPDIR": str(self.work / "tmp")}
        self.server = subprocess.Popen(
            [sys.executable, __file__, str(self.library), str(self.root)],
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.expected: dict[tuple[str, str], dict[str, bytes]] = {}

    def close(self) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()

    def _make_inputs(self, template: Path) -> None:
        from tqtool.container.compression import compress_arrays
        from tqtool.container.selection import Request, choose
        from tqtool.dumps.datafiles import open_file

        rng = np.random.default_rng(0)
        for name in ("in/dump", "out", "tmp"):
            (template / name).mkdir(parents=True)
        place = template / "in"
        k, v = rng.standard_normal((2, 2, 80, 64)).astype(np.float32)
        q = rng.standard_normal((4, 20, 64)).astype(np.float32)
        np.save(place / "k.npy", k)
        np.savez_compressed(place / "kv.npz", layer0_k=k, layer0_v=v, steps=np.arange(5))
        np.savez(place / "qkv.npz", layer0_k=k, layer0_v=v, layer0_q=q)
        for kind, values in (("k", k), ("v", v), ("q", q)):
            np.save(place / f"dump/layer00_{kind}.npy", values)
        (place / "dump/manifest.json").write_text(json.dumps({"query_heads": 4, "kv_heads": 2}))
        for name in ("k.npy", "kv.npz"):
            file = open_file(place / name)
            compress_arrays(file, choose(file, Request()), place / Path(name).with_suffix(".tq.safetensors"))
        np.save(place / "levels.npy", np.array([-0.19, -0.06, 0.06, 0.19]))
        (place / "gate.toml").write_text("[max]\nkl = 100.0\n")
        (place / "config.json").write_text(
            json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2})
        )
        made = [sys.executable, "-m", "tqtool", "validate", place / "dump", "-c", "K4/V2", "-q"]
        subprocess.run([*made, "--json-out", place / "report.json"], check=True, stdout=subprocess.DEVNULL)

    def fresh(self, scenario: Scenario) -> None:
        """Put the folder into its first state."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.root / "template", self.work)
        for name in scenario.outputs if scenario.old else ():
            (self.work / "out" / name).write_bytes(b"old")
            (self.work / "out" / name).chmod(0o600)

    def run(self, scenario: Scenario, fault: Fault | None = None, way: str = "unnamed", threads: int = 1) -> Answer:
        self.fresh(scenario)
        case = {
            "arguments": [*scenario.arguments(self.work), "--threads", str(threads)],
            "stdin": str(self.work / "in/k.npy"),
            "folder": str(self.work),
            "armed": fault.armed() if fault else (-1, 0, 0, 0),
            "no_unnamed": way != "unnamed",
            "no_links": way == "no links",
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(case) + "\n")
        self.server.stdin.flush()
        return Answer(**json.loads(self.server.stdout.readline()))

    def truth(self, name: str) -> dict[str, bytes]:
        """Return what a scenario writes when nothing fails, by path; what it prints by "" if it writes no file."""
        if name not in self.expected:
            answer = self.run(SCENARIOS[name])
            assert answer.status == 0, answer
            written = {path: contents(self.work / "out" / path) for path in SCENARIOS[name].outputs}
            self.expected[name] = written or {"": timeless(answer.out)}
        return self.expected[name]

    def judge(self, name: str, fault: Fault, answer: Answer) -> str:
        """Return what did not hold, "" if all did; ask for `truth` before the case runs."""
        wrong = [*self._wrong_words(fault, answer), *self._wrong_outputs(name, fault, answer)]
        for path in (self.root / "template/in").rglob("*"):
            mine = self.work / "in" / path.relative_to(self.root / "template/in")
            if path.is_file() and mine.read_bytes() != path.read_bytes():
                wrong.append(f"{mine.name} was changed")
        return "; ".join(wrong)

    def _wrong_words(self, fault: Fault, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the status and with stderr."""
        lines = [line for line in answer.err.splitlines() if not _beside(line)]
        if answer.status == 0:
            if lines:
                yield f"exit 0 and {lines}"
            return
        if fault.what in SIGNALS:
            if answer.status != 128 + getattr(signal, fault.what):
                yield f"status {answer.status}"
            if lines != ["tqtool: error[interrupted]: interrupted; nothing partial was left behind"]:
                yield "not the one line of an interruption"
            return
        allowed = {3, 4}  # of the temporary copy of an input or output, and of the folders
        if answer.hit.startswith(str(self.work / "in/")):
            allowed = {3}
        elif answer.hit.startswith(str(self.work / "out/")):
            allowed = {4}
        if answer.status not in allowed:
            yield f"status {answer.status}"
        if len(lines) != 1:
            yield "not one line"
        elif not re.match(rf"tqtool: error\[[a-z-]+\]: ({re.escape(str(self.work))}|stdin|standard output)", lines[0]):
            yield "the line names no file"

    def _wrong_outputs(self, name: str, fault: Fault, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the files and the answer that were left."""
        scenario, truth, done = SCENARIOS[name], self.expected[name], answer.status == 0
        out, temporary = self.work / "out", self.work / "tmp"
        for path, right in truth.items():
            if not path:
                if done and timeless(answer.out) != right:
                    yield "exit 0 and another answer"
                continue
            held = contents(out / path) if (out / path).exists() else None
            if held not in ({right} if done else {right, b"old" if scenario.old else None}):
                yield f"{path} holds {'nothing' if held is None else f'{len(held)} other bytes'}"
            said = "is written whole" in answer.err or fault.what in SIGNALS
            if held == right and not (done or said or len(truth) > 1):
                yield f"{path} is there, and the message does not say so"
            if scenario.old and held is not None and (out / path).stat().st_mode & 0o777 != 0o600:
                yield f"{path} has another mode"
        left = [str(path) for path in temporary.rglob("*")]
        left += [str(path) for path in out.rglob("*") if path.is_file() and str(path.relative_to(out)) not in truth]
        if left and not (fault.kind == "unlink" and "removing" in answer.err):
            yield f"left behind: {left}"


def _beside(line: str) -> bool:
    """Whether a line of stderr is a hint, a note or a warning."""
    return line.startswith("  ") or (line.startswith("tqtool: ") and not line.startswith("tqtool: error["))


def contents(path: Path) -> bytes:
    return timeless(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def timeless(text: str) -> bytes:
    """Return a report or answer without the time of its making."""
    return re.sub(r'"(started|seconds)": "[^"]*"', "", text).encode()


def faults_of(
    counts: dict[str, int], errors: Sequence[str] = ERRORS, signals: Sequence[str] = SIGNALS, most: int | None = None
) -> Iterator[Fault]:
    """Yield every fault of every call, of the first `most` of each kind: errors, short counts, signals."""
    for kind, count in counts.items():
        for at in range(count if most is None else min(count, most)):
            for what in (*errors, *(["short"] if kind in COUNTED else []), *signals):
                yield Fault(kind, at, what)
    for kind in COUNTED:
        if counts.get(kind):
            yield Fault(kind, -1, "short")


def serve(library: str, root: str) -> None:
    """Run each case that comes on stdin in a fork of this process."""
    from tqtool.cli.app import main

    shutil.copytree(Path(root) / "template", Path(root) / "warm")
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for scenario in SCENARIOS.values():  # loads every module that the cases need
            with contextlib.suppress(SystemExit):
                sys.argv = ["tqtool", *scenario.arguments(Path(root) / "warm"), "--threads", "1"]
                main()
    gc.freeze()
    shim = ctypes.CDLL(library)
    shim.faults_hit.restype = ctypes.c_char_p
    shim.faults_count.restype = ctypes.c_long
    for line in sys.stdin:
        case = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _one(shim, case, Path(root), writing)
        os.close(writing)
        with os.fdopen(reading) as answers:
            answer = answers.read()
        _, waited = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(waited)
        found: dict[str, Any] = json.loads(answer) if answer else {"hit": "?", "counts": {}}
        texts = [(Path(root) / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        print(json.dumps({"status": ended, "out": texts[0], "err": texts[1], **found}), flush=True)


def _one(shim: ctypes.CDLL, case: dict[str, Any], root: Path, answer: int) -> None:
    """Be one run of the program, armed; never returns."""
    status = 99
    try:
        new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for number, name, flags in (
            (0, case["stdin"], os.O_RDONLY),
            (1, root / "stdout", new),
            (2, root / "stderr", new),
        ):
            descriptor = os.open(name, flags, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "w" if i else "r", closefd=False) for i in range(3))
        sys.argv = ["tqtool", *case["arguments"]]
        from tqtool.cli.app import main

        shim.faults_arm(case["folder"].encode(), *case["armed"], int(case["no_unnamed"]), int(case["no_links"]))
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
        except BaseException:  # what would be a traceback on the terminal
            traceback.print_exc()
            status = 98
        gc.collect()
        shim.faults_disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        counts = {kind: shim.faults_count(number) for number, kind in enumerate(KINDS)}
        os.write(answer, json.dumps({"hit": os.fsdecode(shim.faults_hit()), "counts": counts}).encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(*sys.argv[1:])
