"""The options of a measurement: everything that changes a number in a report, and nothing else.

They check themselves, so that whoever makes them, the command line or a program, is told of the same mistakes. What
only the data can tell is checked where the data are: the layers to protect, the formats of engines, a window that
needs a mask.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from tqtool.codec.sizes import KVConfig
from tqtool.codec.terms import LAWS, METAS, SCALE_RULES, Law, Meta, ScaleRule
from tqtool.errors import UsageError

MAX_SEED = 2**64 - 1
MAX_BITS_PER_VALUE = 16.0


@dataclass(frozen=True, slots=True)
class Params:
    """Every option that changes a number.

    Raises: `UsageError` for a value that is out of its range, and for two that contradict each other.
    """

    configs: tuple[str, ...]
    baselines: tuple[str, ...] = ()  # formats of engines, by name
    seeds: tuple[int, ...] = (0,)
    law: Law = "beta"
    key_scale_rule: ScaleRule = "match"
    value_scale_rule: ScaleRule = "match"
    meta: Meta = "range"
    causal: bool | None = None  # None: causal where the shapes allow it, synthetic sets never
    window: int | None = None
    attention_scale: str = ""  # "" = the manifest's, else 1/sqrt(dim)
    softcap: float | None = None  # of all layers; None: the manifest's
    tokens: tuple[int, ...] = ()  # first, and one past the last, position that holds a token; (): the manifest's or all
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

    def __post_init__(self) -> None:
        _check_configs(self.configs)
        for bits in self.recommend_widths:
            KVConfig(bits, bits)
        _check_numbers("seeds", self.seeds, 0, MAX_SEED)
        if not self.seeds:
            raise UsageError("seeds are empty: there is no rotation to measure with", code="usage")
        _check_word("law", self.law, LAWS)
        _check_word("key_scale_rule", self.key_scale_rule, SCALE_RULES)
        _check_word("value_scale_rule", self.value_scale_rule, SCALE_RULES)
        _check_word("meta", self.meta, METAS)
        for name, least in (("residual_window", 0), ("sink_tokens", 0), ("nosink_tokens", 0), ("bootstrap_draws", 1)):
            _check_least(name, getattr(self, name), least)
        for name in ("window", "max_queries", "context"):
            if getattr(self, name) is not None:
                _check_least(name, getattr(self, name), 1)
        _check_numbers("protect_layers", self.protect_layers, 0, None)
        if self.window is not None and self.causal is False:
            raise UsageError("a window needs a causal mask", code="usage", hint="leave out --no-causal or --window")
        _check_positive("attention_scale", _number(self.attention_scale) if self.attention_scale else None)
        _check_positive("softcap", self.softcap)
        _check_range("tokens", self.tokens)
        _check_positive("budget", self.budget, MAX_BITS_PER_VALUE)
        _check_positive("target_kl", self.target_kl)
        if self.budget is not None and self.target_kl is not None:
            raise UsageError("budget and target_kl contradict each other", code="usage")
        if self.budget is not None and not self.recommend_widths:
            raise UsageError("budget has no meaning without recommend_widths, the bits to choose from", code="usage")


def _check_configs(configs: tuple[str, ...]) -> None:
    if isinstance(configs, str):
        raise UsageError(f"configs {configs!r}: need a tuple of them", code="usage", hint='as in ("K4/V2", "K3/V2")')
    if not configs:
        raise UsageError("config names no configuration", code="usage", hint="for example K4/V2,K3/V2")
    for config in configs:
        KVConfig.parse(config)


def _check_word(name: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise UsageError(f"{name} {word!r}: need one of {', '.join(known)}", code="usage")


def _check_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} {value!r}: need a whole number, at least {least}", code="usage")


def _check_numbers(name: str, numbers: tuple[int, ...], least: int, most: int | None) -> None:
    for number in numbers:
        _check_least(name, number, least)
        if most is not None and number > most:
            raise UsageError(f"{name} {number}: need 64-bit unsigned numbers", code="usage")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{name} {', '.join(map(str, numbers))}: a number stands there twice", code="usage")


def _check_range(name: str, ends: tuple[int, ...]) -> None:
    if ends and not (len(ends) == 2 and 0 <= ends[0] < ends[1]):
        raise UsageError(f"{name} {':'.join(map(str, ends))}: need A:B with 0 <= A < B", code="usage")


def _check_positive(name: str, value: float | None, most: float | None = None) -> None:
    if value is None:
        return
    if not value > 0 or not isfinite(value):
        raise UsageError(f"{name} {value}: need a number above 0", code="usage")
    if most is not None and value > most:
        raise UsageError(f"{name} {value}: need at most {most:g}", code="usage")


def _number(text: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise UsageError(f"attention_scale {text!r}: need a number above 0", code="usage") from None
