"""Runs the examples of README.md and docs/: every ```console block, command by command, as if in a fresh checkout.

    python tests/readme_examples.py --write     writes the real output into the pages

A line `$ COMMAND` is run by the shell, what follows up to the next `$` or the end of the block is its output. Blocks of
another kind (```sh, ```python, ```yaml) are shown, not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    command: str
    output: str


def examples(page: str) -> list[Example]:
    found = []
    for block in BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Example(command, output))
    return found


def prepare(folder: Path) -> str:
    """Make an empty folder look like the checkout to the examples that read the sample."""
    for name in ("tqtool", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return str(folder)


def run(command: str, folder: str) -> str:
    """Run a command as a reader would, with this Python's tqtool first on the path; both streams together."""
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", "")
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def rewritten(page: str, folder: str) -> str:
    """Return the page with the output that its commands give now."""

    def block(match: re.Match[str]) -> str:
        commands = [example.command for example in examples(match[0])]
        return "```console\n" + "".join(f"$ {c}\n{run(c, folder)}" for c in commands) + "```"

    return BLOCK.sub(block, page)


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    for path in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            text = path.read_text()
            path.write_text(rewritten(text, prepare(Path(folder))))
            print(f"{path.name}: {len(examples(text))} examples")


if __name__ == "__main__":
    main()
