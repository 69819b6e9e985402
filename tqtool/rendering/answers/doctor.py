"""What is installed and the outcome of its self-test, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqtool.rendering.tables import Column, table_text

if TYPE_CHECKING:
    from tqtool.doctor import Installation, SelfTest

DOCTOR_SCHEMA = "tqtool.doctor/1"
ENGINES = {
    "runtime": "the C runtime ({})",
    "reference": "the NumPy reference: the C runtime was not compiled at installation, or is switched off",
    "stale": "the NumPy reference: the C runtime was compiled for another version of tqtool; reinstall it",
}


def doctor_text(setup: Installation, checks: Sequence[SelfTest], *, terminal: bool) -> str:
    """Return what is installed and the outcome of the self-test."""
    rows = [
        ("tqtool", setup.tqtool),
        ("python", f"{setup.python}, {setup.platform}"),
        *setup.packages.items(),
        *(
            (name, version or "not installed (only the tests compare with it: tqtool[compare])")
            for name, version in setup.extras.items()
        ),
        ("engine", engine_text(setup)),
        ("C compiler", setup.compiler or "none found; needed by `export-c --verify` and to build the runtime"),
        ("threads", str(setup.threads)),
        *((check.name, f"FAILED: {check.fault}" if check.fault else "ok") for check in checks),
    ]
    return table_text([Column("", "left"), Column("", "left")], rows, terminal=terminal).strip("\n")


def doctor_json(setup: Installation, checks: Sequence[SelfTest]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": DOCTOR_SCHEMA,
        **asdict(setup),
        "checks": [{"name": check.name, "passed": not check.fault, "fault": check.fault or None} for check in checks],
    }


def engine_text(setup: Installation) -> str:
    """Return which engine runs, and why where it is not the C runtime."""
    return ENGINES["stale" if setup.stale else setup.engine].format(setup.instructions)
