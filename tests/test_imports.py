"""What is loaded when, and which way the imports go."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loops import case
from reports import sample_report

import tqtool
from tqtool.report.serialize import report_to_json

PACKAGE = Path(tqtool.__file__).parent
TABLE = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
# Rows of `| room | modules in the order of their imports | …`, the rows in that order too.
ROWS = re.findall(r"^\| (?:`([a-z.]+)` )?\| ((?:`\w+` )+)\|", TABLE, re.MULTILINE)
ORDER = [f"{room}.{name}".lstrip(".") for room, names in ROWS for name in re.findall(r"\w+", names)]


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_import_tqtool_is_light() -> None:
    assert not loaded_after("import tqtool") & {"numpy", "scipy", "typer", "rich", "jinja2"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["validate", "--help"],
        ["compress", "-h"],
        ["bench", "-h"],
        ["capture", "-h"],
        ["eval", "-h"],
        ["size"],
    ],
)
def test_help_version_and_size_load_no_numpy_and_no_scipy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from tqtool.__main__ import main\n"
        f"sys.argv = ['tqtool', *{arguments!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert not set(done.stderr.split()) & {"numpy", "scipy", "jinja2", "torch", "transformers"}


def test_compare_loads_nothing_that_measures_or_reads_dumps(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(report_to_json(sample_report()))
    code = (
        "import sys\n"
        "from tqtool.__main__ import main\n"
        "sys.argv = ['tqtool', 'compare', 'r.json', 'r.json']\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0
    ours = {name.removeprefix("tqtool.") for name in done.stderr.split() if name.startswith("tqtool.")}
    allowed = {"dumps", "dumps.inputs", "dumps.names", "codec", "codec.terms", "codec.sizes"}
    heavy = {
        "codec",
        "runtime",
        "attention",
        "dumps",
        "container",
        "foreign",
        "bench",
        "validation",
        "health",
        "export",
    }
    assert {name for name in ours - allowed if name.split(".")[0] in heavy} == set()


def test_the_codec_loads_scipy_only_to_solve_a_codebook() -> None:
    assert "scipy" not in loaded_after("import tqtool.codec.codec, tqtool.attention.plain")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, types included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            base = (node.module or "").removeprefix("tqtool").removeprefix(".")
            found |= {f"{base}.{alias.name}".strip(".") for alias in node.names} & MODULES.keys() or {
                base
            } & MODULES.keys()
    return found


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_the_table_of_contributing_names_every_module_once() -> None:
    missing, gone = sorted(MODULES.keys() - ORDER), sorted(set(ORDER) - MODULES.keys())
    assert not missing, "add it to the table of CONTRIBUTING.md, behind all that it imports"
    assert not gone, "take it out of the table of CONTRIBUTING.md"
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    """No circle, and no room that reaches up: imports for types count as any other."""
    above = imported(MODULES[module]) - set(ORDER[: ORDER.index(module)] if module in ORDER else ORDER)
    assert not above, "the table of CONTRIBUTING.md is the order of imports"


def test_only_what_help_loads_imports_our_modules_for_types_alone() -> None:
    """The commands and their answers, which would load NumPy for `--help`; elsewhere an import is an import."""
    for name, path in MODULES.items():
        with case(module=name):
            blocks = [node for node in ast.walk(ast.parse(path.read_text())) if is_for_types(node)]
            ours = [part for block in blocks for part in ast.walk(block) if is_ours(part)]
            assert not ours or name.startswith(("cli.", "rendering.answers."))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tqtool"


@pytest.mark.parametrize(
    ("part", "owners"),
    [
        ("jinja2", {"templating"}),
        ("rich", {"rendering", "cli"}),
        ("typer", {"cli"}),
        ("scipy", {"codec", "report"}),
        ("cffi", {"runtime"}),
        ("torch", {"hf"}),
        ("transformers", {"hf"}),
        ("tokenizers", {"hf"}),
    ],
)
def test_each_library_has_its_owner(part: str, owners: set[str]) -> None:
    users = {
        room_of(name)
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == part)
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == part for alias in node.names))
    }
    assert users <= owners


def test_every_public_name_loads() -> None:
    for name in tqtool.__all__:
        with case(name=name):
            assert getattr(tqtool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        tqtool.quantise  # noqa: B018
