"""Tables: plain aligned text off a terminal, a Rich table on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title and side."""

    title: str
    align: Literal["left", "right"] = "right"


def table_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    terminal: bool,
    title: str | None = None,
    width: int | None = None,
    color: bool = True,
) -> str:
    """Return the table as text without a final newline.

    Off a terminal: two spaces between columns, no box, no truncation. On one: Rich's lines, `width` columns wide at
    most. Cells are shown as they are; markup in them has no meaning.
    """
    if terminal:
        return _rich_text(columns, rows, title, width, color)
    widths = [max([len(column.title), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    lines = [title] if title else []
    for row in ([column.title for column in columns], *rows):
        cells = (
            cell.rjust(size) if column.align == "right" else cell.ljust(size)
            for cell, size, column in zip(row, widths, columns, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _rich_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    title: str | None,
    width: int | None,
    color: bool,
) -> str:
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify=column.align, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    out = StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, color_system="auto" if color else None, highlight=False
    )
    console.print(table)
    return out.getvalue().rstrip("\n")
