"""The allocation of bits against all allocations of small cases, and the laws of larger ones."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tqtool.codec.sizes import vector_bytes
from tqtool.errors import UsageError
from tqtool.validation.recommend import LayerCurve, Option, Width, recommend, within_budget, within_target

WIDTHS = (2, 3, 4, 5, 6, 8, 16)


def options(costs, damages) -> list[Option]:
    return [Option(i, int(c), float(d)) for i, (c, d) in enumerate(zip(costs, damages, strict=True))]


def totals(units, places) -> tuple[int, float]:
    picked = [unit[place] for unit, place in zip(units, places, strict=True)]
    return sum(o.cost for o in picked), math.fsum(o.damage for o in picked)


def least_damage(units, budget: int) -> float:
    """All allocations, one by one."""
    fitting = [totals(units, places) for places in product(*(range(len(unit)) for unit in units))]
    return min((damage for cost, damage in fitting if cost <= budget), default=math.inf)


def least_cost(units, target: float) -> float:
    reached = [totals(units, places) for places in product(*(range(len(unit)) for unit in units))]
    return min((cost for cost, damage in reached if damage <= target), default=math.inf)


@st.composite
def regular_units(draw):
    """Equal steps, each saving less than the one before: bits of layers of one shape."""
    units = []
    for _ in range(draw(st.integers(1, 4))):
        savings = sorted(draw(st.lists(st.integers(1, 1000), min_size=3, max_size=4)), reverse=True)
        damages = np.cumsum([0, *savings[::-1]])[::-1]
        units.append(options(20 + 16 * np.arange(len(damages)), damages))
    return units


@st.composite
def any_units(draw):
    count = draw(st.integers(1, 4))
    sizes = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 500)), min_size=1, max_size=4)
    return [options(*zip(*draw(sizes), strict=True)) for _ in range(count)]


@settings(deadline=None, max_examples=150)
@example(  # equal savings are steps of their own, or a budget that fits one of them buys none
    [options((20, 36, 52, 68), d) for d in ((3, 2, 1, 0), (4, 2, 1, 0), (6, 4, 2, 0), (6, 4, 2, 0))], 176
)
@given(regular_units(), st.integers(0, 300))
def test_equal_steps_are_spent_as_well_as_possible(units, budget: int) -> None:
    cost, damage = totals(units, within_budget(units, budget))
    best = least_damage(units, budget)
    if math.isfinite(best):
        assert cost <= budget
        assert damage == best
    else:
        assert cost == sum(min(o.cost for o in unit) for unit in units)


@settings(deadline=None, max_examples=150)
@given(regular_units(), st.integers(0, 4000))
def test_equal_steps_reach_a_target_as_cheaply_as_possible(units, target: int) -> None:
    cost, damage = totals(units, within_target(units, target))
    best = least_cost(units, target)
    assert damage <= target
    assert cost <= best + 16  # damage is whole steps: at most one step beyond the cheapest


@settings(deadline=None, max_examples=200)
@given(any_units(), st.integers(0, 250))
def test_any_choices_are_within_one_step_of_the_best(units, budget: int) -> None:
    cost, damage = totals(units, within_budget(units, budget))
    step = max(o.cost for unit in units for o in unit) - min(o.cost for unit in units for o in unit)
    if math.isfinite(least_damage(units, budget)):
        assert cost <= budget
        assert damage <= least_damage(units, budget - step)


def test_a_choice_that_saves_little_does_not_hide_the_one_behind_it() -> None:
    units = [options((10, 20, 30), (100, 99, 0)), options((10, 20), (50, 20))]
    assert within_budget(units, 40) == [2, 0]
    assert within_budget(units, 50) == [2, 1]
    assert within_budget(units, 30) == [0, 1]
    assert within_target(units, 60) == [2, 0]


@settings(deadline=None, max_examples=100)
@given(any_units(), st.floats(0, 2000))
def test_a_target_is_met_wherever_it_can_be(units, target: float) -> None:
    _, damage = totals(units, within_target(units, target))
    if math.isfinite(least_cost(units, target)):
        assert damage <= target


def model(layers: int, *, hard: int | None = None, dim: int = 128, heads: int = 3) -> list[LayerCurve]:
    """Curves as they are measured: a factor of about 3.7 a bit; one layer may be a hundred times as fragile."""
    curves = []
    for layer in range(layers):
        factor = (1 + 0.3 * math.sin(layer)) * (100 if layer == hard else 1)
        stored = {b: heads * (2 * dim if b == 16 else vector_bytes(dim, b, "range")) for b in WIDTHS}
        damage = {b: 0.0 if b == 16 else factor * 4.0 * 3.7**-b for b in WIDTHS}
        curves.append(
            LayerCurve(
                layer,
                tuple(Width(b, stored[b], damage[b]) for b in WIDTHS),
                tuple(Width(b, stored[b], math.sqrt(damage[b] / 3)) for b in WIDTHS),
                2 * heads * dim,
            )
        )
    return curves


def test_a_budget_is_kept_and_spent() -> None:
    found = recommend("m", model(30), budget=3.7)
    assert found.feasible
    assert 3.68 < found.bits_per_value <= 3.7
    stored = sum(layer.bits_per_value for layer in found.layers) / 30
    assert stored == pytest.approx(found.bits_per_value)
    assert sum(layer.key_bits for layer in found.layers) > sum(layer.value_bits for layer in found.layers)
    assert math.isnan(found.target_kl)


def test_more_bytes_never_do_more_damage() -> None:
    damages = []
    for budget in np.arange(2.5, 8.6, 0.25):
        found = recommend("m", model(7), budget=float(budget))
        damages.append(sum(layer.kl + layer.v_readout_err**2 for layer in found.layers))
    assert all(later <= earlier for earlier, later in pairwise(damages))


def test_the_fragile_layer_gets_the_bits_and_is_protected_when_they_do_not_suffice() -> None:
    found = recommend("m", model(8, hard=5), budget=3.5)
    widths = [layer.key_bits for layer in found.layers]
    assert widths[5] == max(widths)
    assert widths[5] > sorted(widths)[-2]
    curves = model(8)
    broken = tuple(Width(c.bits, c.stored, 0.0 if c.bits == 16 else 9.0 - c.bits / 100) for c in curves[2].keys)
    curves[2] = LayerCurve(2, broken, curves[2].values, curves[2].coordinates)
    found = recommend("m", curves, budget=4.5)
    assert [layer.protect for layer in found.layers] == [number == 2 for number in range(8)]
    assert found.layers[2].key_bits == 16


def test_a_target_holds_for_keys_and_values() -> None:
    found = recommend("m", model(30), target_kl=0.02)
    assert found.feasible
    assert found.kl <= 0.02
    assert sum(layer.v_readout_err**2 for layer in found.layers) / 30 <= 0.02
    assert recommend("m", model(30), target_kl=0.002).bits_per_value > found.bits_per_value
    assert math.isnan(found.budget)


def test_what_cannot_be_reached_is_said() -> None:
    low = recommend("m", model(4), budget=1.0)
    assert not low.feasible
    assert low.reason == "the smallest choice stores 2.5 bits a value"
    short = [LayerCurve(c.layer, tuple(k for k in c.keys if k.bits < 4), c.values, c.coordinates) for c in model(4)]
    far = recommend("m", short, target_kl=1e-3)
    assert not far.feasible
    assert far.reason.startswith("the best choice has a KL of 0.0")


def test_a_layer_that_nothing_depends_on_takes_the_fewest_bits() -> None:
    curves = model(3)
    unread = tuple(Width(c.bits, c.stored, math.nan) for c in curves[1].values)
    curves[1] = LayerCurve(1, curves[1].keys, unread, curves[1].coordinates)
    found = recommend("m", curves, budget=4.5)
    assert found.layers[1].value_bits == 2
    assert math.isfinite(found.v_readout_err)


@pytest.mark.parametrize("goal", [{}, {"budget": 3.0, "target_kl": 0.1}])
def test_one_goal_at_a_time(goal: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="either a budget of bits or a target KL"):
        recommend("m", model(2), **goal)  # type: ignore[arg-type]


def test_the_damage_orders_configurations_as_perplexity_does() -> None:
    """SmolLM2 (dumps/README.md): log perplexity over the exact model's, against kl + v_readout_err^2 there."""
    kl, readout = {4: 0.0270, 3: 0.0988, 2: 0.3620}, {4: 0.0608, 3: 0.1182, 2: 0.2340}
    perplexity = {(4, 4): 25.22, (4, 3): 25.92, (4, 2): 28.63, (3, 3): 32.62, (3, 2): 35.89, (2, 2): 76.99}
    growth = {pair: math.log(value / 23.66) for pair, value in perplexity.items()}
    damage = {(k, v): kl[k] + readout[v] ** 2 for k, v in perplexity}
    assert sorted(damage, key=damage.__getitem__) == sorted(growth, key=growth.__getitem__)
    assert all(2 < growth[pair] / damage[pair] < 3 for pair in damage)
