"""`tqtool doctor`: what is installed, and whether it computes the right bits."""

from __future__ import annotations

import typer

from tqtool.cli import output
from tqtool.cli.options import JsonOption

FAILED = 1


HELP = """Show versions and the engine in use, and run a two-second self-test; exit 1 if it fails."""


def doctor(as_json: JsonOption = False) -> None:
    """Do what `HELP` says."""
    from tqtool import doctor as examination
    from tqtool.rendering.answers.doctor import doctor_json, doctor_text

    setup, checks = examination.installation(), list(examination.self_test())
    if as_json:
        output.answer_json(doctor_json(setup, checks))
    else:
        output.answer(doctor_text(setup, checks, terminal=output.stdout_is_terminal()))
    if any(check.fault for check in checks):
        raise typer.Exit(FAILED)
