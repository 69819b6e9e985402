"""Every example of the README and the docs does what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loops import case
from readme_examples import PAGES, ROOT, examples, prepare, run

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def shape(text: str) -> list[str]:
    """The text without its numbers and spacing: times and last digits may differ from machine to machine."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_give_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    folder = prepare(tmp_path)
    for example in examples(page.read_text()):
        assert shape(run(example.command, folder)) == shape(example.output), example.command


def test_the_two_commands_are_one_line_each_and_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    for name in ("validate", "test"):
        with case(name=name):
            marked = re.search(rf"<!-- command: {name} -->\n```sh\n(.+)\n```", readme)
            assert marked, name
            assert marked[1].startswith("python3 -m venv .venv && .venv/bin/pip install -q ")
            assert f"command_of {name}" in ci
    assert readme.index("<!-- command: test -->") < 2500  # on the first screen


def test_every_command_of_the_program_is_in_the_readme() -> None:
    listed = run("tqtool --help", ".").split("Commands:\n")[1].split("\n\n")[0]
    commands = re.findall(r"^  ([a-z-]+)", listed, re.MULTILINE)
    assert len(commands) >= 8
    readme = (ROOT / "README.md").read_text()
    assert [name for name in commands if f"`tqtool {name}" not in readme] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_error_code_is_documented_and_every_documented_code_exists() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "tqtool").rglob("*.py"))
    raised = set(re.findall(r'code="([a-z0-9-]+)"', source)) | set(re.findall(r'_fail\("([a-z]+)"', source))
    raised |= set(re.findall(r'print_error\("([a-z]+)"', source))
    table = (ROOT / "docs" / "errors.md").read_text().split("| code | exit | means |")[1]
    documented = {
        code
        for row in table.splitlines()
        if row.startswith("| `")
        for code in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])
    }
    assert raised - documented == set()
    assert documented - raised == set()
