"""The options of a measurement refuse what has no meaning; what only the data tell is refused where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reports import sample_report

from tqtool.errors import InputError, UsageError
from tqtool.report.params import Params
from tqtool.report.serialize import report_from_json, report_to_json
from tqtool.validation.dataset import from_arrays
from tqtool.validation.run import validate

REFUSED = [
    ({"configs": ()}, "config names no configuration"),
    ({"configs": "K4/V2"}, "configs 'K4/V2': need a tuple of them"),
    ({"configs": ("K9/V2",)}, "9 bits: a side has 1 to 8 bits, or 16 for untouched"),
    ({"seeds": ()}, "seeds are empty: there is no rotation to measure with"),
    ({"seeds": (3, 3)}, "seeds 3, 3: a number stands there twice"),
    ({"seeds": (-1,)}, "seeds -1: need a whole number, at least 0"),
    ({"seeds": (2**64,)}, "seeds 18446744073709551616: need 64-bit unsigned numbers"),
    ({"law": "normal"}, "law 'normal': need one of beta, sphere, gaussian"),
    ({"key_scale_rule": "best"}, "key_scale_rule 'best': need one of match, norm, lsq, unbiased"),
    ({"value_scale_rule": "best"}, "value_scale_rule 'best': need one of match, norm, lsq, unbiased"),
    ({"meta": "f16"}, "meta 'f16': need one of range, f32, bf16"),
    ({"window": 0}, "window 0: need a whole number, at least 1"),
    ({"window": 8, "causal": False}, "a window needs a causal mask"),
    ({"max_queries": 0}, "max_queries 0: need a whole number, at least 1"),
    ({"context": 0}, "context 0: need a whole number, at least 1"),
    ({"attention_scale": "abc"}, "attention_scale 'abc': need a number above 0"),
    ({"attention_scale": "-1"}, "attention_scale -1.0: need a number above 0"),
    ({"attention_scale": "inf"}, "attention_scale inf: need a number above 0"),
    ({"softcap": 0.0}, "softcap 0.0: need a number above 0"),
    ({"tokens": (5, 5)}, "tokens 5:5: need A:B with 0 <= A < B"),
    ({"tokens": (5,)}, "tokens 5: need A:B with 0 <= A < B"),
    ({"residual_window": -5}, "residual_window -5: need a whole number, at least 0"),
    ({"residual_window": 1.5}, "residual_window 1.5: need a whole number, at least 0"),
    ({"residual_window": True}, "residual_window True: need a whole number, at least 0"),
    ({"sink_tokens": -1}, "sink_tokens -1: need a whole number, at least 0"),
    ({"nosink_tokens": -1}, "nosink_tokens -1: need a whole number, at least 0"),
    ({"bootstrap_draws": 0}, "bootstrap_draws 0: need a whole number, at least 1"),
    ({"protect_layers": (-1,)}, "protect_layers -1: need a whole number, at least 0"),
    ({"recommend_widths": (9,)}, "9 bits: a side has 1 to 8 bits, or 16 for untouched"),
    ({"recommend_widths": (2, 4), "budget": 0.0}, "budget 0.0: need a number above 0"),
    ({"recommend_widths": (2, 4), "budget": 17.0}, "budget 17.0: need at most 16"),
    ({"budget": 4.0}, "budget has no meaning without recommend_widths, the bits to choose from"),
    ({"target_kl": float("nan")}, "target_kl nan: need a number above 0"),
    ({"recommend_widths": (2, 4), "budget": 4.0, "target_kl": 0.1}, "budget and target_kl contradict each other"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Params(**({"configs": ("K4/V2",)} | options))
    assert (str(caught.value), caught.value.code) == (message, "usage")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protect_layers": (99,)}, "protect_layers 99: no such layer; there are 0"),
        ({"baselines": ("nope",)}, "no baseline 'nope'"),
    ],
)
def test_what_only_the_data_tell_is_refused_where_they_are(options: dict[str, Any], message: str) -> None:
    k, v, q = np.random.default_rng(5).standard_normal((3, 2, 40, 32), dtype=np.float32)
    with pytest.raises(UsageError) as caught:
        validate([from_arrays(k, v, q)], Params(("K4/V2",), **options))
    assert (str(caught.value), caught.value.code) == (message, "usage")


def test_a_report_with_options_that_cannot_have_been_is_no_report() -> None:
    text = report_to_json(sample_report()).replace('"residual_window": 0', '"residual_window": -5')
    with pytest.raises(InputError, match=r"^report: residual_window -5: need a whole number, at least 0$") as caught:
        report_from_json(text)
    assert caught.value.code == "report"
