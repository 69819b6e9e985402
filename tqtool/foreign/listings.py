"""Lists of numbers in texts: JSON, source code of any language that writes lists in braces or brackets, bare lists.

Nothing is executed and no type is believed. A list knows its name and the record it stands in, which tell what it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqtool.codec.rotation import MAX_DIM, MIN_DIM

NAME_DEPTH = 8  # how far up a list looks for a name

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|#[ \t][^\n]*", re.DOTALL)  # `#define` stays: it may hold a table
_TOKEN = re.compile(
    r"""(?P<number>[-+]?\s*(?:0[xX][0-9a-fA-F]*\.?[0-9a-fA-F]*[pP][-+]?\d+
                           |(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))(?:_?f(?:16|32|64)|[fFlLhHuU])?(?![\w.])
      |(?P<name>[A-Za-z_]\w*|"[^"\n]*"|'[^'\n]*')
      |(?P<mark>\S)""",
    re.VERBOSE,
)


@dataclass(slots=True)
class NumberList:
    """A list or record as read: its numbers as written, and the one it stands in."""

    own_name: str  # empty where it is an item of its parent
    parent: NumberList | None = None
    index: int = 0  # in the parent
    texts: list[str] = field(default_factory=list)
    children: int = 0
    plain: bool = True  # nothing but numbers between commas
    dim: int | None = None

    @property
    def name(self) -> str:
        """Its name, or that of a list around it with the indices that lead here."""
        indices, outer = "", self
        for _ in range(NAME_DEPTH):
            if outer.own_name or outer.parent is None:
                break
            indices, outer = f"[{outer.index}]{indices}", outer.parent
        return (outer.own_name or "list") + indices


def number_lists(text: str) -> list[NumberList]:
    """Return the lists of numbers of a text that hold nothing else, in their order."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            document = json.loads(stripped, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
            return list(_json_lists(document, "", None))
        except (ValueError, RecursionError):
            pass  # a list in another notation
    if numbers := bare_list(stripped):
        return [NumberList("levels", texts=numbers)]
    return _source_lists(text)


def bare_list(text: str) -> list[str] | None:
    """Return the numbers of a text that holds nothing but numbers, commas and spaces, None for any other text."""
    parts = [part for part in re.split(r"[,;\s]+", text.strip("[](){} \t\n")) if part]
    try:
        [float(part) for part in parts]
    except ValueError:
        return None
    return parts or None


class _Number(str):
    """A number of a JSON document, as written."""

    __slots__ = ()


def _json_lists(value: Any, name: str, dim: int | None) -> Iterator[NumberList]:
    if isinstance(value, dict):
        known = [value[key] for key in ("dim", "head_dim", "d") if isinstance(value.get(key), _Number)]
        dim = as_dim(known[0]) if known else dim
        record = NumberList(name)
        for key, inner in value.items():
            for found in _json_lists(inner, f"{name}.{key}" if name else key, as_dim(key) or dim):
                found.parent = found.parent or record
                yield found
    elif isinstance(value, list):
        if value and all(isinstance(item, _Number) for item in value):
            yield NumberList(name, texts=list(value), dim=dim)
        else:
            for index, inner in enumerate(value):
                yield from _json_lists(inner, f"{name}[{index}]", dim)


def as_dim(text: str) -> int | None:
    """Return the vector length that a text is, None if it is none."""
    whole = text.isascii() and text.isdecimal() and len(text) < 5
    return int(text) if whole and MIN_DIM <= int(text) <= MAX_DIM else None


def _source_lists(text: str) -> list[NumberList]:
    """Return the innermost lists of numbers of source text; rows of records get the dim that a list of dims gives."""
    dims: list[int] = []
    lists: list[NumberList] = []
    for found in _bracketed(_COMMENT.sub(" ", text)):
        if "dim" in found.name.lower() and all(as_dim(number) for number in found.texts):
            dims = [int(number) for number in found.texts]
        else:
            lists.append(found)
    for found in lists:
        record = found.parent
        if dims and record and record.parent and record.parent.children % len(dims) == 0:
            found.dim = dims[record.index * len(dims) // record.parent.children]
            found.own_name = record.name
    return lists


def _bracketed(text: str) -> Iterator[NumberList]:
    """Yield every list that holds numbers and nothing else."""
    stack: list[NumberList] = []
    subscripts = 0  # `[` after a name declares a size or picks an item: its numbers belong to no list
    name, previous = "", ""
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup, token.group()
        inside = stack[-1] if stack else None
        if subscripts:
            subscripts += (word == "[") - (word == "]")
        elif word == "[" and previous in ("name", "]", ">"):
            subscripts = 1
        elif word in ("{", "["):
            index = inside.children if inside else 0
            nested = inside and previous in ("{", "[", ",")
            stack.append(NumberList("" if nested else name, inside, index))
            if inside:
                inside.children += 1
        elif word in ("}", "]"):
            if inside:
                stack.pop()
                if inside.plain and inside.texts and not inside.children:
                    yield inside
        elif kind == "name":
            name = word.strip("\"'")
            if inside and name in ("FLT_MAX", "INFINITY", "HUGE_VALF"):
                inside.texts.append("inf")
            elif inside:
                inside.plain = False
        elif inside and kind == "number" and previous != "number":
            inside.texts.append(token["number"].replace(" ", ""))
        elif inside and word not in (",", "\\"):
            inside.plain = False
        previous = kind if kind in ("name", "number") else word


def literal(text: str) -> tuple[float, float]:
    """Return a number as written, NaN if it is none after all, and half a unit of its last digit."""
    try:
        if "x" in text.lower():
            return float.fromhex(text), 0.0
        value = float(text)
    except (ValueError, OverflowError):
        return math.nan, 0.0
    mantissa, _, exponent = text.lower().partition("e")
    try:
        return value, 0.5 * 10.0 ** (int(exponent or "0") - len(mantissa.partition(".")[2]))
    except (ValueError, OverflowError):  # an exponent of a thousand digits
        return value, 0.0
