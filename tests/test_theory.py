"""The expected errors against published figures and against simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.codec import decode, encode, expected_error
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import SCALE_RULES
from tqtool.codec.theory import expected_errors


@pytest.mark.parametrize(("bits", "reference"), [(2, 0.116006), (3, 0.033968), (4, 0.009316)])
def test_the_norm_rule_loses_the_reference_distortion(bits: int, reference: float) -> None:
    assert expected_errors(128, bits, "beta")["norm"] == pytest.approx(reference, abs=6e-7)


@pytest.mark.parametrize("dim", [16, 60, 64, 128, 576, 1024])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("law", ["beta", "sphere", "gaussian"])
def test_two_ways_to_the_reference_distortion_agree(dim: int, bits: int, law: Any) -> None:
    assert expected_errors(dim, bits, law)["norm"] == pytest.approx(lloyd_max(dim, bits, law).distortion, rel=1e-6)


@pytest.mark.parametrize(("dim", "bits"), [(32, 4), (64, 2), (64, 4), (128, 1), (128, 2), (128, 3), (128, 4), (80, 8)])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_random_directions_lose_what_theory_says(dim: int, bits: int, rule: Any) -> None:
    x = np.random.default_rng(8).standard_normal((12_000, dim)).astype(np.float32)
    spec = CodecSpec(dim, bits, scale_rule=rule)
    error = ((decode(encode(x, spec)) - x) ** 2).sum(-1, dtype=np.float64) / (x**2).sum(-1, dtype=np.float64)
    noise = error.std() / np.sqrt(len(x)) / error.mean()
    assert error.mean() == pytest.approx(expected_error(spec), rel=0.004 + 4 * noise)


@pytest.mark.parametrize("bits", range(1, 9))
def test_least_squares_loses_least(bits: int) -> None:
    errors = expected_errors(128, bits, "beta")
    assert min(errors, key=errors.__getitem__) == "lsq"
