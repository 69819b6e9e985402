"""Bits of every layer's keys and values under a budget of bytes, or for a target of damage.

The damage of a layer is `kl` of its key bits plus the square of `v_readout_err` of its value bits: both are squared
errors without unit, and on SmolLM2 (perplexity at six configurations) the logarithm of perplexity grew by 2.0 to 2.9
times the one and 2.3 to 2.7 times the other. It is a choice, made here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tqtool.codec.terms import UNTOUCHED
from tqtool.errors import UsageError
from tqtool.report.model import LayerChoice, Recommendation


@dataclass(frozen=True, slots=True)
class Width:
    """One width for one side of a layer: what it stores and what it damages."""

    bits: int
    stored: int  # bytes of the side in the whole cache, all heads: codes, metadata, centres, tokens kept exact
    error: float  # mean `kl` for keys, mean `v_readout_err` for values; NaN where nothing depends on it


@dataclass(frozen=True, slots=True)
class LayerCurve:
    """What was measured of one layer."""

    layer: int
    keys: tuple[Width, ...]
    values: tuple[Width, ...]
    coordinates: int  # of keys and values together, all heads and tokens of the cache


@dataclass(frozen=True, slots=True)
class Option:
    """A choice in the terms of the allocation."""

    place: int  # among the unit's choices
    cost: int
    damage: float


def recommend(
    source: str, curves: Sequence[LayerCurve], *, budget: float | None = None, target_kl: float | None = None
) -> Recommendation:
    """Return the bits of every layer: least damage within `budget` bits a value, or least bytes within a target.

    The target holds for the mean `kl`, and for the mean square of `v_readout_err`, which damages as much.

    Raises: `UsageError` unless exactly one of the two is given.
    """
    if (budget is None) == (target_kl is None):
        raise UsageError("give either a budget of bits or a target KL", code="usage")
    keys = [_options(curve.keys, power=1) for curve in curves]
    values = [_options(curve.values, power=2) for curve in curves]
    total = sum(curve.coordinates for curve in curves)
    if budget is not None:
        units = [unit for pair in zip(keys, values, strict=True) for unit in pair]
        chosen = within_budget(units, math.floor(budget * total / 8 + 1e-9))
        key_places, value_places = chosen[::2], chosen[1::2]
    else:
        assert target_kl is not None
        key_places = within_target(keys, target_kl * len(curves))
        value_places = within_target(values, target_kl * len(curves))
    picked = [
        (curve, curve.keys[k], curve.values[v]) for curve, k, v in zip(curves, key_places, value_places, strict=True)
    ]
    bits = 8 * sum(key.stored + value.stored for _, key, value in picked) / total
    kl = _mean([key.error for _, key, _ in picked])
    readout = _mean([value.error for _, _, value in picked])
    reason = ""
    if budget is not None and bits > budget + 1e-9:
        reason = f"the smallest choice stores {bits:.4g} bits a value"
    elif target_kl is not None and kl > target_kl:
        reason = f"the best choice has a KL of {kl:.3g}"
    elif target_kl is not None and _mean([value.error**2 for _, _, value in picked]) > target_kl:
        reason = f"the best choice reads values out with an error of {readout:.3g}"
    return Recommendation(
        source=source,
        budget=math.nan if budget is None else budget,
        target_kl=math.nan if target_kl is None else target_kl,
        bits_per_value=bits,
        kl=kl,
        v_readout_err=readout,
        feasible=not reason,
        layers=tuple(
            LayerChoice(
                layer=curve.layer,
                key_bits=key.bits,
                value_bits=value.bits,
                bits_per_value=8 * (key.stored + value.stored) / curve.coordinates,
                kl=key.error,
                v_readout_err=value.error,
                protect=UNTOUCHED in (key.bits, value.bits),
            )
            for curve, key, value in picked
        ),
        reason=reason,
    )


def within_budget(units: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Pick one option of each unit: least total damage at a total cost of at most `budget`.

    Greedy by damage saved per byte along each unit's lower convex hull. Exact where steps cost the same and each
    saves less than the one before (bits of equal layers); elsewhere no worse than the optimum of a budget that
    is smaller by one step. The cheapest options are returned when even they cost more.
    """
    chosen = [unit[0] for unit in map(_hull, units)]
    spare = budget - sum(option.cost for option in chosen)
    for _, place, _, option in sorted(_steps(units)):
        extra = option.cost - chosen[place].cost
        if extra <= spare:  # where it is not, the unit's later steps cost even more
            chosen[place], spare = option, spare - extra
    while better := [  # what is left may buy an option off the hull
        (option.damage - chosen[place].damage, place, option)
        for place, unit in enumerate(units)
        for option in unit
        if option.damage < chosen[place].damage and option.cost - chosen[place].cost <= spare
    ]:
        _, place, option = min(better, key=lambda item: item[:2])
        spare -= option.cost - chosen[place].cost
        chosen[place] = option
    return [option.place for option in chosen]


def within_target(units: Sequence[Sequence[Option]], target: float) -> list[int]:
    """Pick one option of each unit: least total cost at a total damage of at most `target`; greedy likewise."""
    chosen = [unit[0] for unit in map(_hull, units)]
    for _, place, _, option in sorted(_steps(units)):
        if sum(each.damage for each in chosen) <= target:
            break
        chosen[place] = option
    while cheaper := [  # the last step may have bought more than was needed
        (option.cost - chosen[place].cost, place, option)
        for place, unit in enumerate(units)
        for option in unit
        if option.cost < chosen[place].cost
        and sum(each.damage for each in chosen) - chosen[place].damage + option.damage <= target
    ]:
        _, place, option = min(cheaper, key=lambda item: item[:2])
        chosen[place] = option
    return [option.place for option in chosen]


def _options(choices: Sequence[Width], *, power: int) -> list[Option]:
    return [
        Option(place, choice.stored, 0.0 if math.isnan(choice.error) else choice.error**power)
        for place, choice in enumerate(choices)
    ]


def _hull(unit: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of damage over cost, from the cheapest on; equal savings stay steps."""
    hull: list[Option] = []
    for option in sorted(unit, key=lambda each: (each.cost, each.damage)):
        if hull and option.damage >= hull[-1].damage:
            continue
        while len(hull) > 1 and _saving(hull[-1], option) > _saving(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _saving(one: Option, other: Option) -> float:
    """Damage saved per byte from one option to a dearer one."""
    return (one.damage - other.damage) / (other.cost - one.cost)


def _steps(units: Sequence[Sequence[Option]]) -> Iterator[tuple[float, int, int, Option]]:
    """Yield (-saving, unit, number, option) of all steps along the hulls: sorted, each unit's stay in order."""
    for place, unit in enumerate(units):
        for number, (one, other) in enumerate(pairwise(_hull(unit))):
            yield -_saving(one, other), place, number, other


def _mean(errors: Sequence[float]) -> float:
    known = [error for error in errors if not math.isnan(error)]
    return sum(known) / len(known) if known else math.nan
