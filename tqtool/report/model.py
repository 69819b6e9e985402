"""The Report: everything one `validate` run measured, as values and without text layout.

Every output is a pure function of this value. A float that could not be measured is NaN, and the value that holds it
says why in its `reason`; nothing is infinite. Only `run` differs between two runs with the same inputs and options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tqtool.dumps.inputs import Input
from tqtool.report.layer_facts import LayerFacts
from tqtool.report.params import Params

SCHEMA = "tqtool.validate/1"  # keys are only ever added within one number
NAN = float("nan")
METRIC_VERSION = 1  # raised when a formula changes and figures stop being comparable

Better = Literal["higher", "lower", "neither"]
MetricSide = Literal["K", "V", "both", "context"]
Status = Literal["pass", "fail", "unverified", "error"]
Level = Literal["strict", "balanced", "lenient", "none"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric id means; `METRICS` holds them all."""

    id: str
    title: str
    unit: str
    better: Better
    side: MetricSide


_SIDES: tuple[tuple[str, str, MetricSide], ...] = (
    ("", "", "both"),
    ("_konly", ", values exact", "K"),
    ("_vonly", ", keys exact", "V"),
)
_OUTPUT: tuple[tuple[str, str, Better], ...] = (
    ("cos", "output cosine", "higher"),
    ("rel_err", "output relative error", "lower"),
    ("cos_centered", "output cosine, mean value removed", "higher"),
    ("rel_err_centered", "output relative error, mean value removed", "lower"),
)
METRICS: Mapping[str, Metric] = {
    metric.id: metric
    for metric in (
        *(
            Metric(name + suffix, title + words, "", better, side)
            for name, title, better in _OUTPUT
            for suffix, words, side in _SIDES
        ),
        Metric("kl", "attention KL divergence", "nats", "lower", "K"),
        Metric("kl_nosink", "attention KL without the first tokens", "nats", "lower", "K"),
        Metric("sigma_a", "score noise", "nats", "lower", "K"),
        Metric("sigma_rms", "score noise, root mean square over the queries of a head", "nats", "lower", "K"),
        Metric("sigma_pred", "the same, predicted without quantizing", "nats", "lower", "K"),
        Metric("tv", "share of attention moved", "", "lower", "K"),
        Metric("top1_decisive", "same arg-max where it is decisive", "", "higher", "K"),
        Metric("mass_8", "mass kept by the top 8", "", "higher", "K"),
        Metric("mass_8_nosink", "mass kept by the top 8 without the first tokens", "", "higher", "K"),
        Metric("v_readout_err", "value read-out error", "", "lower", "V"),
        Metric("n_eff", "tokens effectively read", "tokens", "neither", "context"),
        Metric("k_rel_mse", "key relative squared error", "", "lower", "K"),
        Metric("v_rel_mse", "value relative squared error", "", "lower", "V"),
        Metric("k_distortion_ratio", "key error over its expectation", "", "lower", "K"),
        Metric("v_distortion_ratio", "value error over its expectation", "", "lower", "V"),
        Metric("distortion_ratio", "larger of both distortion ratios", "", "lower", "both"),
        Metric("k_cos", "cosine per key vector", "", "higher", "K"),
        Metric("v_cos", "cosine per value vector", "", "higher", "V"),
        Metric("k_norm_ratio", "restored over original key norm", "", "neither", "K"),
        Metric("v_norm_ratio", "restored over original value norm", "", "neither", "V"),
    )
}


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric of one row, aggregated over the queries or vectors of all (layer, head) pairs.

    With several rotation seeds `mean` is the mean over seeds; every other extreme is that of the worst seed.
    """

    mean: float  # macro mean over (layer, head)
    low: float  # quantile `tail_percent` over all queries, equal head weight
    high: float  # quantile 100 - tail_percent
    tail_percent: int  # 1; 5 where fewer than 500 queries were pooled
    min: float
    max: float
    worst: float  # worst head mean; worst = in the direction of METRICS[id].better
    worst_head: str  # "L07.H2"; "" where there is none
    worst_layer: float  # worst mean of one layer over its heads
    worst_layer_name: str  # "L07"
    ci_low: float  # 95 % interval of the mean
    ci_high: float
    ci_method: str  # "cluster bootstrap", "per-query SE", or "" where there is none
    seed_low: float  # smallest and largest macro mean over the rotation seeds
    seed_high: float
    count: int  # queries (or vectors) behind it
    reason: str = ""  # why the numbers are NaN


@dataclass(frozen=True, slots=True)
class Bucket:
    """Means over the queries at positions first..last (inclusive, numbered from 0)."""

    first: int
    last: int
    queries: int
    values: Mapping[str, float]  # metric id -> mean


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration over one source."""

    source: str
    config: str  # "K4/V2", or a baseline's name: "q4_0+H"
    kind: Literal["control", "turboquant", "baseline"]
    bits_per_value: float  # stored bits, metadata and protected tokens included
    key_bits_per_value: float
    value_bits_per_value: float
    pair_bytes: float  # stored bytes of the K and V vector of one head and token
    ratio_fp32: float
    ratio_fp16: float
    shared_bytes: int  # once per cache whatever its length: signs, codebooks, means; not in the above
    level: Level  # the highest gate level whose conditions all hold
    status: Status  # "unverified" from proxy queries, "error" when nothing was quantized
    verdict: str  # the words to print
    misses: tuple[str, ...]  # why not one level better: "kl_p99 0.31 > 0.2 (worst L20.H1: 0.09)"
    pareto: bool  # no other row of the source beats it in bits_per_value, kl and v_readout_err
    metrics: Mapping[str, Summary]
    predicted: Mapping[str, float]  # theory beside the same ids: "cos", "sigma_a", "v_readout_err"
    published: Mapping[str, str]  # the specification's own figures: "cos": "~0.94"
    buckets: tuple[Bucket, ...]
    note: str = ""  # for example: turbo4's table as shipped


@dataclass(frozen=True, slots=True)
class LayerValues:
    """Means of one layer of one row, and of each of its KV heads."""

    source: str
    config: str
    layer: int
    values: Mapping[str, float]  # metric id -> mean over heads
    heads: Mapping[str, tuple[float, ...]]  # metric id -> mean of each KV head


@dataclass(frozen=True, slots=True)
class Source:
    """What was measured: one dump or one synthetic set.

    `kv_heads` to `scale` are those of the first layer; `layer_facts` tells them of every layer.
    """

    name: str
    kind: Literal["dump", "synthetic"]
    layers: tuple[int, ...]
    kv_heads: int
    query_heads: int
    tokens: int
    queries: int  # per query head
    dim: int
    query_source: Literal["captured", "proxy", "synthetic"]
    causal: bool
    scale: float  # c of s = c q.k
    n_eff_low: float  # smallest and largest head mean
    n_eff_high: float
    key_offset: float  # |mean k|^2 / mean |k|^2, median over heads
    key_offset_worst: float
    zero_keys: int
    zero_values: int
    iid: bool  # looks like independent Gaussian data: says nothing about a model
    min_key_bits: Mapping[str, int]  # "L07" -> bits that sigma_pred asks for at the KL target
    notes: tuple[str, ...]  # what was taken for what
    sink_share: float = NAN  # attention on the first `nosink_tokens` keys, mean over heads
    outlier_share: float = NAN  # of the keys' energy about their mean in the strongest 2.5 % of channels, median head
    layer_facts: tuple[LayerFacts, ...] = ()
    model: str = ""  # its name, where a manifest tells it
    model_layers: int | None = None  # of the model, measured or not
    context: int | None = None  # tokens at which sizes are priced; None: the dump's own
    fewest_keys: int | None = None  # of the layer whose queries see fewest, and of the layer with fewest queries, all
    fewest_queries: int | None = None  # heads together: too few carry no level
    queries_left_out: int = 0  # of a query head, all layers: some of their keys are no longer stored


@dataclass(frozen=True, slots=True)
class Check:
    """One gated quantity against its limit."""

    source: str
    config: str
    metric: str  # id with suffix: "cos_p01"
    relation: Literal[">=", "<="]
    measured: float
    limit: float
    status: Status
    where: str  # "L27.H3", or ""
    reason: str = ""
    worst: float = NAN  # the mean of the head that `where` names; `measured` may be another quantity


@dataclass(frozen=True, slots=True)
class Gate:
    """What was asked and what came out; `passed` is true when no gate was asked."""

    name: str  # "none", "balanced", "balanced + --min cos=0.99" …
    passed: bool
    checks: tuple[Check, ...]
    summary: str  # one line, the first failure named


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosis sentence and the rule that made it."""

    rule: str
    sentence: str
    source: str = ""
    config: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning: a short code for scripts and a line for people."""

    code: str
    text: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The bits recommended for one layer and what they cost there."""

    layer: int
    key_bits: int  # 16 = keep untouched
    value_bits: int
    bits_per_value: float
    kl: float
    v_readout_err: float
    protect: bool


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Per-layer bits of one source under a budget."""

    source: str
    budget: float  # bits per value; NaN when a KL target was given
    target_kl: float  # NaN when a budget was given
    bits_per_value: float
    kl: float  # mean over layers
    v_readout_err: float
    feasible: bool
    layers: tuple[LayerChoice, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OverPrompts:
    """One metric of one configuration over several dumps of one model, each a text of its own."""

    config: str
    metric: str
    prompts: int
    mean: float  # of the dumps' means
    ci_low: float  # 95 % interval of the mean over texts
    ci_high: float
    worst: float  # mean of the worst dump
    worst_source: str


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement, complete."""

    tool: str
    command: str  # reproduces the numbers
    inputs: tuple[Input, ...]
    params: Params
    sources: tuple[Source, ...]
    rows: tuple[Row, ...]
    layers: tuple[LayerValues, ...]
    gate: Gate
    diagnosis: tuple[Finding, ...]
    next: str  # the one command to try next, or ""
    warnings: tuple[Notice, ...]
    recommendations: tuple[Recommendation, ...]
    environment: Mapping[str, str]  # versions, engine, processor
    run: Mapping[str, str]  # started, seconds, threads: the only part that differs between runs
    schema: str = SCHEMA
    metric_version: int = METRIC_VERSION
    prompts: tuple[OverPrompts, ...] = ()  # of two dumps of one model or more
