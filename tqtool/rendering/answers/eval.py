"""An evaluation as text, Markdown and one HTML page; its JSON is `report.evaluation`'s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tqtool.rendering.report.markdown import escape
from tqtool.rendering.tables import Column, table_text
from tqtool.report.evaluation import SETTINGS, EvalRow, Evaluation
from tqtool.templating import template

TITLES = (
    "cache",
    "bits/value",
    "perplexity",
    "change",
    "KL",
    "KL p99",
    "KL by quarter",
    "same top-1",
    "greedy",
    "needles",
)
MEANINGS = {
    "bits/value": "stored bits of a key's or value's number, metadata counted, exact tokens not",
    "perplexity": "of the next token over the text, ± standard error",
    "change": "of perplexity, ± standard error of the paired differences",
    "KL": "divergence of the next-token distribution from the exact cache's, nats, mean",
    "KL p99": "its 99 % quantile",
    "KL by quarter": "its means over the first to the last quarter of the text",
    "same top-1": "share of positions whose likeliest next token is the same",
    "greedy": "leading tokens of greedy decoding after the text that are the same",
    "needles": "facts hidden in the text that are given back when asked for at its end",
}


@dataclass(frozen=True, slots=True)
class SettingTable:
    """The caches of one setting: what was exact in it, and a row of cells for each."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def headline(evaluation: Evaluation) -> str:
    """Return in a sentence what the first cache changes, in both settings."""
    name = next((row.config for row in evaluation.rows if row.setting != "exact"), None)
    if name is None:
        return f"{evaluation.model}: nothing was compared"
    told = {row.setting: row for row in evaluation.rows if row.config == name}
    words = {"every-token": "with every token quantized", "past-only": "with the current chunk exact"}
    parts = [
        f"{words[setting]} {1 - row.same_top:.1%} of its likeliest next tokens and perplexity by {_change(row)}"
        for setting, row in told.items()
        if setting in words
    ]
    return f"{evaluation.model}: {name} changes {'; '.join(parts)}"


def tables(evaluation: Evaluation) -> tuple[SettingTable, ...]:
    """Return a table for each setting, the control first."""
    found = []
    for setting in SETTINGS:
        rows = tuple(_cells(row, evaluation) for row in evaluation.rows if row.setting == setting)
        if rows:
            found.append(SettingTable(evaluation.sentence(setting), rows))
    return tuple(found)


def facts(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the lines about model, texts and codec."""
    model = evaluation.architecture + (f", commit {evaluation.revision}" if evaluation.revision else "")
    kept = evaluation.layers - evaluation.compressed_layers
    layers = f"{evaluation.compressed_layers} of {evaluation.layers} layers compressed"
    texts = ", ".join(f"{text.source} ({text.tokens:,} tokens)" for text in evaluation.texts)
    options = ", ".join(f"{name} {value}" for name, value in evaluation.options.items())
    return (
        f"{evaluation.model}: {model}; {layers}{'; the others have windows or no keys' if kept else ''}",
        f"{evaluation.positions:,} next tokens of {texts}, in chunks of {evaluation.chunk}",
        f"codec: {options}",
    )


def evaluation_text(evaluation: Evaluation, *, terminal: bool) -> str:
    """Return the tables for a terminal, or plain text off one."""
    columns = [Column(TITLES[0], "left"), *map(Column, TITLES[1:])]
    parts = [f"{headline(evaluation)}.", "\n".join(facts(evaluation))]
    parts += [
        table_text(columns, table.rows, terminal=terminal, title=f"{table.title}:") for table in tables(evaluation)
    ]
    return "\n\n".join(parts)


def evaluation_markdown(evaluation: Evaluation) -> str:
    """Return the same as GitHub-flavoured Markdown."""
    parts = [f"**{escape(headline(evaluation))}.**", "\n".join(f"- {escape(line)}" for line in facts(evaluation))]
    parts += [f"### {_first_upper(escape(each.title))}\n\n{_markdown_table(each.rows)}" for each in tables(evaluation)]
    parts.append("\n".join(f"- {escape(name)}: {escape(meaning)}" for name, meaning in MEANINGS.items()))
    return "\n\n".join(parts) + "\n"


def evaluation_html(evaluation: Evaluation) -> str:
    """Return one page that opens from disk: no script, no request."""
    return template("eval.html.j2", {"first_upper": _first_upper}, html=True)(
        headline=headline(evaluation),
        facts=facts(evaluation),
        titles=TITLES,
        meanings=MEANINGS,
        tables=tables(evaluation),
        tool=evaluation.tool,
    )


def _cells(row: EvalRow, evaluation: Evaluation) -> tuple[str, ...]:
    perplexity = math.exp(row.nll)
    found = sum(needle.found for needle in row.needles)
    return (
        row.config,
        f"{row.bits_per_value:.2f}",
        f"{perplexity:.2f} ± {perplexity * row.nll_error:.2f}",
        _change(row),
        _small(row.kl),
        _small(row.kl_p99),
        " ".join(map(_small, row.kl_quarters)),
        f"{row.same_top:.1%}",
        f"{row.greedy_alike}/{evaluation.greedy_tokens * len(evaluation.texts)}",
        f"{found}/{len(row.needles)}" if row.needles else "–",
    )


def _change(row: EvalRow) -> str:
    factor = math.exp(row.change)
    return f"{factor - 1:+.1%} ± {100 * factor * row.change_error:.1f}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = [TITLES, ["---", *["---:"] * (len(TITLES) - 1)], *[list(map(escape, row)) for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
