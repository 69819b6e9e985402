"""A Comparison as text and as JSON."""

from __future__ import annotations

from typing import Any

from tqtool.rendering.report.figures import clean, figure, signed
from tqtool.rendering.tables import Column, table_text
from tqtool.report.comparison import Comparison
from tqtool.report.serialize import to_plain

SCHEMA = "tqtool.compare/1"
MARKS = {"better": "+ better", "worse": "- worse", "same": "= same", "unclear": "? unclear"}
COLOURS = {"better": "32", "worse": "31", "same": "2", "unclear": "33"}


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return the comparison as a JSON document."""
    plain: dict[str, Any] = to_plain(found)
    return {"schema": SCHEMA, **plain}


def comparison_text(found: Comparison, *, color: bool = False) -> str:
    """Return the comparison as text: one table per source, what differs in the options, what has no partner."""
    a, b = map(clean, found.names)
    blocks = [f"A: {a}\nB: {b}"]
    if found.params:
        blocks.append("\n".join(f"{name}: {clean(old)} -> {clean(new)}" for name, (old, new) in found.params.items()))
    titles = ("config", "bits/value A", "B", "metric", "A", "B", "B - A", "95 % interval", "change")
    columns = [Column(title, "left" if title in ("config", "metric", "change") else "right") for title in titles]
    for source in dict.fromkeys((pair.source_a, pair.source_b) for pair in found.pairs):
        rows = []
        for pair in found.pairs:
            if (pair.source_a, pair.source_b) != source:
                continue
            for i, d in enumerate(pair.differences):
                head = [clean(pair.config), f"{pair.bits_a:.2f}", f"{pair.bits_b:.2f}"] if i == 0 else ["", "", ""]
                interval = "" if d.ci_low != d.ci_low else f"{signed(d.ci_low)} .. {signed(d.ci_high)}"
                figures = [figure(d.a, d.metric), figure(d.b, d.metric), signed(d.difference), interval]
                rows.append([*head, d.metric, *figures, MARKS[d.change]])
        table = table_text(columns, rows, terminal=False)
        if color:
            for change, mark in MARKS.items():
                table = table.replace(f"  {mark}\n", f"  \x1b[{COLOURS[change]}m{mark}\x1b[0m\n")
        name = clean(source[0]) if source[0] == source[1] else f"{clean(source[0])} -> {clean(source[1])}"
        blocks.append(f"{name}\n{table}")
    notes = [f"note: {note}" for note in found.notes]
    notes += [
        f"only in {which}, {clean(source)}: {clean(', '.join(configs))}"
        for which, alone in (("A", found.only_a), ("B", found.only_b))
        for source, configs in alone.items()
    ]
    blocks.append("\n".join(notes))
    return "\n\n".join(block for block in blocks if block) + "\n"
