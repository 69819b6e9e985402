"""What the tests share: where the real dumps and cases are, and how the command line is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# As `tqtool validate` does: our threads times BLAS threads fight for the cores. Read when NumPy is first loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of PyTorch: tiny models gain nothing from threads

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real dumps and cases beside the checkout."""
    if not (SHARED / "dumps").is_dir():
        pytest.skip("../shared (real dumps and cases) is not beside this checkout")
    return SHARED


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tqtool(tmp_path: Path) -> Run:
    """Run the real command line in an empty folder: tqtool("size", "--json") -> CompletedProcess."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tqtool", *map(str, arguments)]
        chosen = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120} | options
        return subprocess.run(command, check=False, **chosen)  # type: ignore[call-overload, no-any-return]

    return run
