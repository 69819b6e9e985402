"""What foreign tables cost, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.foreign.appraisal import Appraisal
from tqtool.rendering.tables import Column, table_text

FULL_WIDTH = 120  # of a terminal that shows every column


def appraisal_text(
    found: Sequence[Appraisal],
    tolerance: float,
    edited: Sequence[str] = (),
    *,
    width: int | None = None,
    color: bool = True,
) -> str:
    """Return a line a table, a sentence for each cause, and the verdict.

    `tolerance` is a share of the optimal error; `edited` names the domains that a header's checksum does not fit;
    `width` is that of a terminal, None where the text goes elsewhere.
    """
    full = width is None or width >= FULL_WIDTH
    columns = [
        Column("table", "left"),
        Column("d"),
        Column("bits"),
        Column("domain", "left"),
        *([Column("law", "left")] if full else []),
        Column("cost"),
        Column("worst level" if full else "level"),
        *([Column("found"), Column("right")] if full else []),
        Column("sigma off"),
    ]
    rows = [
        [
            each.table.name,
            str(each.dim or "-"),
            str(each.table.bits),
            each.domain,
            *([each.law] if full else []),
            percent(each.excess),
            str(each.worst),
            *([_level(each.table.levels, each), _level(each.right, each)] if full else []),
            f"{each.deviation[each.worst]:+.1e}",
        ]
        for each in found
    ]
    lines = [table_text(columns, rows, terminal=width is not None, width=width, color=color)]
    lines += [f"{each.table.name}: {each.sentence}" for each in found if each.cause != "none"]
    dear = sum(each.excess > tolerance for each in found)
    limit = f"{100 * tolerance:g} % more squared error than the optimum"
    if not dear:
        lines.append(f"ok: {'1 table' if len(found) == 1 else f'{len(found)} tables'} within {limit}")
    elif len(found) == 1:
        lines.append(f"FAIL: the table costs over {limit}")
    else:
        lines.append(f"FAIL: {dear} of {len(found)} tables cost over {limit}")
    lines += [f"FAIL: the {name} tables are not those that the header's CRC-32 is of" for name in edited]
    return "\n".join(lines)


def _level(levels: NDArray[np.float64], appraisal: Appraisal) -> str:
    return f"{levels[appraisal.worst]:.6g}"


def percent(share: float) -> str:
    """Return a cost as people compare it: `+0.0066 %`, `+108.9 %`; what rounding alone explains is 0."""
    return "0 %" if abs(share) < 1e-9 else f"{100 * share:+.{4 if abs(share) < 0.1 else 1}f} %"


def appraisal_json(found: Sequence[Appraisal], tolerance: float, edited: Sequence[str] = ()) -> dict[str, Any]:
    """Return the same values for programs; costs are shares of the optimal error, deviations standard deviations."""
    return {
        "schema": "tqtool.check-codebooks/1",
        "tolerance": tolerance,
        "passed": not edited and all(each.excess <= tolerance for each in found),
        "edited_domains": list(edited),
        "tables": [
            {
                "name": each.table.name,
                "dim": each.dim,
                "bits": each.table.bits,
                "domain": each.domain,
                "law": each.law,
                "excess": each.excess,
                "passed": each.excess <= tolerance,
                "cause": each.cause,
                "sentence": each.sentence,
                "worst_level": each.worst,
                "levels": each.table.levels.tolist(),
                "right": each.right.tolist(),
                "deviation": each.deviation.tolist(),
            }
            for each in found
        ],
    }
