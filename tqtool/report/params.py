"""The options of a measurement: everything that changes a number in a report, and nothing else."""

from dataclasses import dataclass

from tqtool.codec.terms import Law, Meta, ScaleRule


@dataclass(frozen=True, slots=True)
class Params:
    """Every option that changes a number."""

    configs: tuple[str, ...]
    baselines: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    law: Law = "beta"
    key_scale_rule: ScaleRule = "match"
    value_scale_rule: ScaleRule = "match"
    meta: Meta = "range"
    causal: bool | None = None  # None: causal where the shapes allow it, synthetic sets never
    window: int | None = None
    attention_scale: str = ""  # "" = the manifest's, else 1/sqrt(dim)
    softcap: float | None = None  # of all layers; None: the manifest's
    tokens: tuple[
        int, ...
    ] = ()  # first and one past the last position that holds a token; (): the manifest's, else all
    context: int | None = None  # tokens at which sizes are priced; None: the model's if it is known, else the dump's
    max_queries: int | None = None
    center_keys: bool = False
    center_values: bool = False
    protect_layers: tuple[int, ...] = ()
    residual_window: int = 0
    sink_tokens: int = 0
    nosink_tokens: int = 1  # the first so many tokens are left out of the *_nosink metrics
    synthetic_seed: int = 1
    synthetic_recipe: int = 1
    bootstrap_draws: int = 1000
    recommend_widths: tuple[int, ...] = ()  # bits measured on both sides for a recommendation, rows or not
    budget: float | None = None  # bits a value of the recommendation
    target_kl: float | None = None  # of the recommendation and of min_key_bits; None there: the balanced level's
