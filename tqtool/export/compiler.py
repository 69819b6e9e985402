"""The C compiler at hand, and the exported folder's own tests run with it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqtool.errors import SetupError

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wmissing-declarations", "-Werror")
VARIANTS = (("-O3",), ("-O1", "-DFA_TQ_PLAIN"))  # what `verify` compiles


def verify(files: Mapping[str, str]) -> str:
    """Compile and run the folder's tests, in a temporary folder, in several ways; return what they print.

    Raises: `SetupError` without a compiler, `subprocess.CalledProcessError` (with `output`) if a step fails.
    """
    compiler = c_compiler()
    if not compiler:
        raise SetupError("no C compiler found", code="compiler", hint="install one, or name it in CC")
    printed = []
    with tempfile.TemporaryDirectory(prefix="tqtool-") as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        for flags in VARIANTS:
            sources = ("test_turboquant.c", "turboquant.c")
            build = (*compiler, "-std=c99", *WARNINGS, *flags, "-o", "test_turboquant", *sources, "-lm")
            printed += [f"{shlex.join(build)}\n", _run(build, folder), _run(("./test_turboquant",), folder)]
    return "".join(printed)


def _run(command: Sequence[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, shlex.join(command), output=done.stdout)
    return done.stdout


def c_compiler() -> list[str]:
    """Return the command of the C compiler: CC's, else cc, gcc or clang; [] if there is none."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return []
