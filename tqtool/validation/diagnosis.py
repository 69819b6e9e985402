"""What the numbers say: findings, each a rule and a sentence; a report shows the first three."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

from tqtool.health import LARGE_OFFSET
from tqtool.report.gates import limit_of
from tqtool.report.model import Finding, Report, Row, Source

MOST = 3
PARALLEL = 0.9  # of that share: the vectors nearly all point the same way
MANY_SEEDS = 4
NOMINAL = 1.1  # distortion ratios up to here are what theory expects
FAR = 2.0  # one side's error is so many times the other's
BLIND_COS, BLIND_CENTRED = 0.99, 0.9  # a cosine above the first says nothing while its centred form is below the second
SHARP = 32  # keys effectively read
OUTLIER_SHARE = 0.3  # of the keys' energy in 2.5 % of the channels; 0.03 where channels are alike
SINK_SHARE = 0.25  # of the attention on the first token
BOUNDARY = 2  # layers at each end; vLLM skips so many by default
STAND_IN = " (UNVERIFIED: keys stood in for the queries)"
BOUNDARY_LAYERS = 6  # fewer layers have no middle


def diagnose(report: Report) -> tuple[Finding, ...]:
    """Return the findings, dumps before synthetic sets and the gravest rules first; `MOST` of them are shown."""
    sources = sorted(report.sources, key=lambda source: source.kind != "dump")
    found: list[Finding] = []
    for source in sources:
        rows = [row for row in report.rows if row.source == source.name and row.kind == "turboquant"]
        rows = sorted((row for row in rows if row.status != "error"), key=lambda row: -row.bits_per_value)
        for rule in RULES:
            name = rule.__name__.strip("_")
            rests = STAND_IN if source.query_source == "proxy" and rule not in WITHOUT_QUERIES else ""
            found += [
                Finding(name, f"{text.removesuffix('.')}{rests}.", source.name, row.config)
                for row, text in rule(source, rows, report)
            ]
    return tuple(found)


Found = Iterator[tuple[Row, str]]  # the row that shows it, the sentence
Rule = Callable[[Source, Sequence[Row], Report], Found]


def _key_offset(source: Source, rows: Sequence[Row], report: Report) -> Found:
    share = source.key_offset_worst
    if share <= LARGE_OFFSET or report.params.center_keys:
        return
    for row in islice(_moved(rows), 1):
        nominal = row.metrics["k_distortion_ratio"].mean <= NOMINAL
        although = " although keys are stored as well as theory allows" if nominal else ""
        yield (
            row,
            f"At {row.config} attention moves (KL {row.metrics['kl'].mean:.3g}){although}: keys share a large common "
            f"vector ({share:.0%} of their energy); try --center-keys or more key bits.",
        )


def _rotation_not_spreading(source: Source, rows: Sequence[Row], report: Report) -> Found:
    """Nearly parallel vectors are left out under few seeds: one rotation is then one draw, not a mean."""
    if source.key_offset_worst > PARALLEL and len(report.params.seeds) < MANY_SEEDS:
        return
    for row in islice((row for row in rows if row.metrics["distortion_ratio"].mean > NOMINAL), 1):
        ratio = row.metrics["distortion_ratio"].mean
        yield (
            row,
            f"At {row.config} error is {ratio:.2f} times what theory expects: rotation is not spreading this data.",
        )


def _cosine_blind(source: Source, rows: Sequence[Row], report: Report) -> Found:
    def figures(row: Row) -> tuple[float, float]:
        return row.metrics["cos"].mean, row.metrics["cos_centered"].mean

    blind = (row for row in rows if figures(row)[0] >= BLIND_COS and figures(row)[1] < BLIND_CENTRED)
    for row in islice(blind, 1):
        cos, centred = figures(row)
        yield (
            row,
            f"Output cosine {cos:.3f} at {row.config} is dominated by the mean value vector; read the centred columns "
            f"({centred:.2f}).",
        )


def _cosine_order(source: Source, rows: Sequence[Row], report: Report) -> Found:
    if source.kind == "synthetic":
        return
    pairs = combinations(sorted(rows, key=damage), 2)
    turned = ((a, b) for a, b in pairs if 0 < damage(a)[0] < damage(b)[0] and _cos(a) < _cos(b))
    for one, other in islice(turned, 1):
        yield (
            one,
            f"Output cosine alone orders {one.config} and {other.config} the other way round ({_cos(one):.4f}, "
            f"{_cos(other):.4f}): {other.config} moves attention {damage(other)[0] / damage(one)[0]:.1f} times as far, "
            "and keys decide.",
        )


def _one_side(source: Source, rows: Sequence[Row], report: Report) -> Found:
    """Judged where both sides have the same bits: elsewhere the configuration itself favours one."""
    sharp = f" (attention is sharp: {source.n_eff_low:.3g} keys in one head)" if source.n_eff_low < SHARP else ""
    for row in rows:
        k, v = row.metrics["rel_err_konly"].mean, row.metrics["rel_err_vonly"].mean
        if row.key_bits_per_value != row.value_bits_per_value or not 0 < FAR * min(k, v) < max(k, v):
            continue
        if k > v:
            yield row, f"At {row.config} keys cause {k / v:.1f} times the error of values: spend bits on K{sharp}."
        else:
            yield row, f"At {row.config} values cause {v / k:.1f} times the error of keys: spend bits on V."
        return


def _outlier_channels(source: Source, rows: Sequence[Row], report: Report) -> Found:
    if source.outlier_share > OUTLIER_SHARE:
        for row in islice(_moved(rows), 1):
            yield (
                row,
                f"A few outlier channels carry {source.outlier_share:.0%} of the keys' energy; rotation spreads them, "
                "but score noise follows the keys' length: more key bits help.",
            )


def _boundary_layers(source: Source, rows: Sequence[Row], report: Report) -> Found:
    if len(source.layers) < BOUNDARY_LAYERS or report.params.protect_layers:
        return
    ends = {*source.layers[:BOUNDARY], *source.layers[-BOUNDARY:]}
    for row in rows:
        kl = {v.layer: v.values["kl"] for v in report.layers if (v.source, v.config) == (source.name, row.config)}
        worst = max(kl, key=lambda layer: kl[layer])
        inner = max(value for layer, value in kl.items() if layer not in ends)
        if worst in ends and kl[worst] > FAR * inner:
            yield (
                row,
                f"Layer {worst} is worst (KL {kl[worst]:.3g}, inner layers at most {inner:.3g}): protect boundary "
                f"layers, --protect-layers first{BOUNDARY},last{BOUNDARY}.",
            )
            return


def _sink(source: Source, rows: Sequence[Row], report: Report) -> Found:
    if source.sink_share > SINK_SHARE and not report.params.sink_tokens:
        for row in rows[:1]:
            yield (
                row,
                f"The first token draws {source.sink_share:.0%} of the attention: without it {row.config} has KL "
                f"{row.metrics['kl_nosink'].mean:.3g} in place of {row.metrics['kl'].mean:.3g}; --sink-tokens 1 keeps "
                "it exact.",
            )


def _moved(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows whose attention moves more than the balanced level allows."""
    return (row for row in rows if row.metrics["kl"].mean > limit_of("balanced", "kl"))


def _cos(row: Row) -> float:
    return row.metrics["cos"].mean


RULES: tuple[Rule, ...] = (
    _key_offset,
    _rotation_not_spreading,
    _cosine_blind,
    _cosine_order,
    _outlier_channels,
    _boundary_layers,
    _one_side,
    _sink,
)


WITHOUT_QUERIES: tuple[Rule, ...] = (_rotation_not_spreading,)  # judged by what is stored alone


def damage(row: Row) -> tuple[float, float]:
    """Return what orders rows as perplexity does: attention KL first, value read-out error second."""
    return row.metrics["kl"].mean, row.metrics["v_readout_err"].mean
