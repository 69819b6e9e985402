"""What is loaded when, and which way the imports go."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tqtool

PACKAGE = Path(tqtool.__file__).parent
# Each module may import those on earlier lines, and those on its own line.
LAYERS = [
    {"errors", "escapes"},
    {"sizes", "units", "naming"},
    {"rotation", "packing", "codebook", "model_config"},
    {"theory"},
    {"reference"},
    {"runtime"},
    {"codec"},
    {"rope"},
    {"attention"},
    {"cache"},
    {"files"},
    {"inputs"},
    {"dumps", "synthetic"},
    {"health", "foreign"},
    {"container"},
    {"metrics", "baselines"},
    {"recommend", "report"},
    {"validation"},
    {"rendering"},
    {"cli"},
]


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_import_tqtool_is_light() -> None:
    assert not loaded_after("import tqtool") & {"numpy", "scipy", "typer", "rich", "jinja2"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["validate", "--help"], ["compress", "-h"], ["bench", "-h"], ["size"]]
)
def test_help_version_and_size_load_no_numpy_and_no_scipy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from tqtool.cli import main\n"
        f"sys.argv = ['tqtool', *{arguments!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert not set(done.stderr.split()) & {"numpy", "scipy", "jinja2"}


def test_the_codec_loads_scipy_only_to_solve_a_codebook() -> None:
    assert "scipy" not in loaded_after("import tqtool.codec, tqtool.attention")


def imported(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports anywhere, types excepted."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tqtool."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "tqtool":
            found.update(alias.name for alias in node.names if not alias.name.startswith("__"))
    return found


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_no_module_imports_in_a_circle_or_upwards() -> None:
    edges: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if module_of(path) not in {"__init__", "__main__"}:
            edges.setdefault(module_of(path), set()).update(imported(path) - {module_of(path)})
    done: list[str] = []
    while edges:
        ready = sorted(name for name, needs in edges.items() if needs <= set(done))
        assert ready, f"a circle of imports among {sorted(edges)}"
        done += ready
        for name in ready:
            del edges[name]
    position = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for path in PACKAGE.rglob("*.py"):
        name = module_of(path)
        for needed in imported(path):
            if name in position and needed in position:
                assert position[needed] <= position[name], f"{path.name} imports {needed}, which stands above it"


@pytest.mark.parametrize(
    ("part", "owner"), [("jinja2", "rendering"), ("rich", "rendering cli"), ("typer", "cli"), ("scipy", "codebook")]
)
def test_each_library_has_its_owner(part: str, owner: str) -> None:
    users = {
        module_of(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == part)
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == part for alias in node.names))
    }
    assert users <= set(owner.split())


def test_every_public_name_loads() -> None:
    for name in tqtool.__all__:
        assert getattr(tqtool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        tqtool.quantise  # noqa: B018
