"""The caches that `eval` compares: ours, and what stands beside them in an engine or in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, HQQQuantizedLayer, QuantoQuantizedLayer

from tqtool.errors import UsageError
from tqtool.hf.cache import Coding, turboquant_cache
from tqtool.hf.extra import require, version_of
from tqtool.report.evaluation import Setting

FP8_MOST = float(torch.finfo(torch.float8_e4m3fn).max)
GROUP = 64  # values that share a scale and a zero in the caches of transformers, 16 bits each
BASELINES = {"fp8": (), "quanto": ("optimum-quanto",), "hqq": ("hqq",)}  # and the packages that they need


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cache to compare, in one setting."""

    config: str
    setting: Setting
    bits_per_value: float
    make: Callable[[], DynamicCache]


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


def candidates(config: Any, codings: list[Coding], baselines: list[str], *, dim: int) -> list[Candidate]:
    """Return the exact control, then every coding and baseline, both settings of each where it has both.

    `baselines` are names of `BASELINES`. Raises: `SetupError` ("extra") for one whose package is missing.
    """
    found = [Candidate("exact", "exact", 16, lambda: DynamicCache(config=config))]
    for exact_chunk, setting in ((False, "every-token"), (True, "past-only")):
        for coding in codings:
            # without a window the first setting is the letter of the specification
            one = replace(coding, exact_chunk=exact_chunk, residual_window=coding.residual_window * exact_chunk)
            bits = sum(8 * spec.vector_bytes / spec.dim for spec in one.specs(dim, dim)) / 2
            found.append(Candidate(str(one.kv), setting, bits, lambda one=one: cache_of(config, one)))  # type: ignore[arg-type, misc]
        if "fp8" in baselines:
            one = replace(codings[0], exact_chunk=exact_chunk, residual_window=codings[0].residual_window * exact_chunk)
            found.append(Candidate("fp8", setting, 8, lambda one=one: replaced(config, lambda: Fp8Layer(one))))  # type: ignore[arg-type, misc]
    window = codings[0].residual_window
    for name, bits, layer in (("quanto", 4, QuantoQuantizedLayer), ("hqq", 4, HQQQuantizedLayer)):
        if name in baselines:
            require(f"--baselines {name}", *BASELINES[name])
            options = {"nbits": bits, "q_group_size": GROUP, "residual_length": max(window, 1)}
            options |= {"axis_key": 1, "axis_value": 1} if name == "hqq" else {}

            def make(layer: Any = layer, options: dict[str, int] = options) -> DynamicCache:
                return replaced(config, lambda: layer(**options))

            found.append(Candidate(f"{name} int{bits}", "past-only", bits + 32 / GROUP, make))
    return found


def installed_baselines() -> list[str]:
    """Return the baselines whose packages are installed."""
    return [name for name, packages in BASELINES.items() if all(version_of(package) for package in packages)]


def cache_of(config: Any, coding: Coding) -> DynamicCache:
    """Return our cache of a coding."""
    return turboquant_cache(
        config,
        coding.kv,
        residual_window=coding.residual_window,
        sink_tokens=coding.sink_tokens,
        exact_chunk=coding.exact_chunk,
        meta=coding.meta,
        law=coding.law,
        key_rule=coding.key_rule,
        value_rule=coding.value_rule,
        seed=coding.seed,
    )


def replaced(config: Any, make: Callable[[], Any]) -> DynamicCache:
    """Return a cache whose full-attention layers are others; `UsageError` if there are none."""
    cache = DynamicCache(config=config)
    if not any(type(layer) is DynamicLayer for layer in cache.layers):
        raise UsageError("nothing to compress: the model has no full-attention layer", code="usage")
    cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
