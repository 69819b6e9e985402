"""A test that asserts in a loop says which pass of it failed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from loops import case

TESTS = Path(__file__).parent
MODULES = sorted(path for path in TESTS.rglob("*.py") if "slow" not in path.parts)


def nameless(node: ast.AST, *, in_loop: bool = False) -> Iterator[int]:
    """Yield the lines of assertions in a `for` that neither stand in a `case` of that loop nor have a message."""
    for child in ast.iter_child_nodes(node):
        if in_loop and asserts(child):
            yield child.lineno  # type: ignore[attr-defined]
        inside = (in_loop or isinstance(child, ast.For)) and not (is_case(child) or isinstance(child, ast.FunctionDef))
        yield from nameless(child, in_loop=inside)


def asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return node.msg is None
    if isinstance(node, ast.Call):
        name = called(node)
        says = any(word.arg == "err_msg" for word in node.keywords) or (name == "assert_array_equal" and node.args[2:])
        return name == "raises" or (name.startswith("assert_") and not says)
    return False


def is_case(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and called(node.items[0].context_expr) == "case"


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_an_assertion_in_a_loop_says_which_case_failed(path: Path) -> None:
    lines = list(nameless(ast.parse(path.read_text("utf-8"))))
    assert not lines, f"{path.name}, lines {lines}: parametrise, or write `with case(name=name):` in the loop"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("for i in x:\n    assert i", [2]),
        ("for i in x:\n    assert i, i", []),
        ("for i in x:\n    with case(i=i):\n        assert i", []),
        ("for i in x:\n    with case(i=i), raises(ValueError):\n        f(i)", []),
        ("for i in x:\n    with pytest.raises(ValueError):\n        f(i)", [2]),
        ("for i in x:\n    np.testing.assert_allclose(i, 1)", [2]),
        ("for i in x:\n    assert_array_equal(i, 1, 'i')", []),
        ("for i in x:\n    with case(i=i):\n        for j in i:\n            assert j", [4]),
        ("for i in x:\n    for j in i:\n        with case(i=i, j=j):\n            assert j\n    assert i", [5]),
        ("for i in x:\n    def f():\n        assert i", []),
        ("assert x", []),
    ],
)
def test_loops_without_names_are_found(text: str, lines: list[int]) -> None:
    assert list(nameless(ast.parse(text))) == lines


def test_an_error_in_a_case_carries_its_name() -> None:
    with pytest.raises(ValueError, match="bad") as caught, case(dim=64, name="k" * 300):
        raise ValueError("bad")
    (note,) = caught.value.__notes__
    assert note.startswith("case: dim = 64, name = 'kkkk")
    assert len(note) < 200
