"""What several dumps of one model cost together, as the terminal, Markdown and the page show it."""

from tqtool.rendering.report.figures import figure
from tqtool.report.model import OverPrompts, Report

HEADER = ("config", "KL mean", "V read-out", "cos", "worst KL", "in")
_METRICS = ("kl", "v_readout_err", "cos")


def title(report: Report) -> str:
    """Return the heading of the table over several dumps of one model."""
    return f"Over {report.prompts[0].prompts} dumps, each a text: mean and 95 % interval of the mean over texts"


def rows(report: Report) -> list[list[str]]:
    """Return the cells under HEADER, a row for each configuration; none where there is one dump."""
    found = {(each.config, each.metric): each for each in report.prompts}
    found_rows = []
    for config in dict.fromkeys(each.config for each in report.prompts):
        cells = [found[config, metric] for metric in _METRICS]
        found_rows.append([config, *map(_with_interval, cells), figure(cells[0].worst, "kl"), cells[0].worst_source])
    return found_rows


def _with_interval(each: OverPrompts) -> str:
    mean, low, high = (figure(value, each.metric) for value in (each.mean, each.ci_low, each.ci_high))
    return f"{mean} [{low}, {high}]"
