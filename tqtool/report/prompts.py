"""Several dumps of one model as a sample of prompts: what a configuration costs over them, with an interval.

The interval of a row is over the heads of one text and says nothing of another text; this one does. Few prompts give a
wide interval: with two it is 9 standard deviations to either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, sqrt

from tqtool.report.model import METRICS, OverPrompts, Row, Source

PROMPT_METRICS = ("cos", "rel_err", "kl", "v_readout_err")  # those of the levels
QUANTILE = 0.975


def over_prompts(rows: Sequence[Row], sources: Sequence[Source]) -> tuple[OverPrompts, ...]:
    """Return each configuration's metrics over the dumps, none unless there are two dumps or more of equal layers.

    Source of the interval: Student's t over the dumps' means, each text one observation.
    """
    dumps = [source for source in sources if source.kind == "dump"]
    if len(dumps) < 2 or len({_shape(source) for source in dumps}) > 1:
        return ()
    names = [source.name for source in dumps]
    found = []
    for config in dict.fromkeys(row.config for row in rows if row.kind != "control"):
        of_config = {row.source: row for row in rows if row.config == config and row.source in names}
        if len(of_config) == len(names):
            found += [_over(config, metric, [of_config[name] for name in names]) for metric in PROMPT_METRICS]
    return tuple(found)


def _shape(source: Source) -> tuple[object, ...]:
    """Return what two dumps of one model have in common: the layers and their heads and vectors."""
    of_layers = tuple((f.layer, f.kv_heads, f.group, f.key_dim, f.value_dim) for f in source.layer_facts)
    return source.model, source.layers, source.query_source, of_layers


def _over(config: str, metric: str, rows: Sequence[Row]) -> OverPrompts:
    from scipy.special import stdtrit  # SciPy is loaded only where it is needed

    means = [row.metrics[metric].mean for row in rows]
    sign = -1 if METRICS[metric].better == "higher" else 1
    count = len(means)
    mean = sum(means) / count
    half = float(stdtrit(count - 1, QUANTILE)) * sqrt(sum((x - mean) ** 2 for x in means) / (count - 1) / count)
    worst = max(rows, key=lambda row: -1.0 if isnan(row.metrics[metric].mean) else sign * row.metrics[metric].mean)
    return OverPrompts(config, metric, count, mean, mean - half, mean + half, worst.metrics[metric].mean, worst.source)
