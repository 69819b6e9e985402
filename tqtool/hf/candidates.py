"""The caches that `eval` compares: ours, and what stands beside them in an engine or in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, QuantoQuantizedLayer

from tqtool.errors import UsageError
from tqtool.hf.cache import Coding, TurboQuantLayer, coded_cache
from tqtool.hf.extra import require, version_of
from tqtool.report.evaluation import Setting

FP8_MOST = float(torch.finfo(torch.float8_e4m3fn).max)
GROUP = 64  # values that share a scale and a zero in quanto's cache, 16 bits each
BASELINES = {"fp8": (), "quanto": ("optimum-quanto",)}  # and the packages that they need


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cache to compare, in one setting."""

    config: str
    setting: Setting
    make: Callable[[], DynamicCache]
    nominal_bits: float | None = None  # stored bits of a value; None: as the cache's codes say

    def bits_per_value(self, cache: DynamicCache) -> float:
        """Return the stored bits of a value, of a cache that holds tokens; exact tokens do not count."""
        if self.nominal_bits is not None:
            return self.nominal_bits
        sides = [side for layer in cache.layers if isinstance(layer, TurboQuantLayer) for side in layer.sides or ()]
        values = sum(prod(side.encoded.shape) for side in sides)
        return 8 * sum(side.encoded.nbytes for side in sides) / values


class Fp8Layer(DynamicLayer):
    """Keys and values as 8-bit floats (e4m3) without a scale, as engines cast them. Measures; saves no memory."""

    def __init__(self, coding: Coding) -> None:
        super().__init__()
        self.coding = coding

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return all keys and values: the past cast, the sinks, the window and an exact chunk as they came."""
        key, value = super().update(key_states, value_states)
        return self._read(key, key_states.shape[2]), self._read(value, key_states.shape[2])

    def _read(self, x: Any, chunk: int) -> Any:
        exact = self.coding.residual_window + (chunk if self.coding.exact_chunk else 0)
        last = max(x.shape[2] - exact, 0)
        first = min(self.coding.sink_tokens, last)
        cast = x[:, :, first:last].clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).to(x.dtype)
        return torch.cat([x[:, :, :first], cast, x[:, :, last:]], 2)


def candidates(config: Any, codings: list[Coding], baselines: list[str]) -> list[Candidate]:
    """Return the exact control, then every coding and baseline in the settings that it has.

    `baselines` are names of `BASELINES`. Raises: `SetupError` ("extra") for one whose package is missing, `UsageError`
    for a model without full-attention layers.
    """
    found = [Candidate("exact", "exact", partial(DynamicCache, config=config), 16)]
    first = codings[0]
    settings: tuple[tuple[Setting, bool], ...] = (("every-token", False), ("past-only", True))
    for setting, exact_chunk in settings:
        rules = {"exact_chunk": exact_chunk, "residual_window": first.residual_window if exact_chunk else 0}
        ours = [replace(coding, **rules) for coding in codings]  # type: ignore[arg-type]
        found += [Candidate(str(each.kv), setting, partial(coded_cache, config, each)) for each in ours]
        if "fp8" in baselines:
            found.append(Candidate("fp8", setting, partial(replaced, config, partial(Fp8Layer, ours[0])), 8))
    if "quanto" in baselines:
        require("--baselines quanto", *BASELINES["quanto"])
        rest = {"nbits": 4, "q_group_size": GROUP, "residual_length": max(first.residual_window, 1)}
        make = partial(QuantoQuantizedLayer, **rest, axis_key=0, axis_value=0)
        found.append(Candidate("quanto int4", "past-only", partial(replaced, config, make), 4 + 32 / GROUP))
    return found


def installed_baselines() -> list[str]:
    """Return the baselines whose packages are installed."""
    return [name for name, packages in BASELINES.items() if all(version_of(package) for package in packages)]


def compressed_layers(config: Any) -> int:
    """Return how many layers of a model a cache of ours compresses."""
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def replaced(config: Any, make: Callable[[], Any]) -> DynamicCache:
    """Return a cache whose full-attention layers are others; `UsageError` if there are none."""
    cache = DynamicCache(config=config)
    if not any(type(layer) is DynamicLayer for layer in cache.layers):
        raise UsageError("nothing to compress: the model has no full-attention layer", code="usage")
    cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
