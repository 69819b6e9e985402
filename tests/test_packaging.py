"""What a user installs: the declared versions, and a source distribution that can test itself."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import tqtool
from tqtool.doctor import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def bounds(requirements: list[str]) -> dict[str, str]:
    found = {}
    for text in requirements:
        parts = re.fullmatch(r"([A-Za-z0-9_-]+)>=([0-9.]+)", text)
        assert parts, f"{text}: a name and its oldest release"
        found[parts[1]] = parts[2]
    return found


def test_the_oldest_releases_that_ci_runs_are_those_declared() -> None:
    lines = (ROOT / ".ci" / "minimum.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned == bounds(PROJECT["dependencies"]) | bounds(PROJECT["optional-dependencies"]["test"])


def test_doctor_names_the_packages_that_are_needed() -> None:
    assert set(PACKAGES) == set(bounds(PROJECT["dependencies"]))


def test_every_package_that_is_imported_is_declared() -> None:
    """By what a plain installation runs; `hf` has an extra."""
    imported: set[str] = set()
    for path in Path(tqtool.__file__).parent.rglob("*.py"):
        if "hf" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    imported -= {"tqtool", "_typeshed", *sys.stdlib_module_names}
    assert imported | {"cffi"} == {*bounds(PROJECT["dependencies"])}  # the compiled runtime imports its backend


def test_the_version_is_said_once() -> None:
    assert PROJECT["version"] == tqtool.__version__
