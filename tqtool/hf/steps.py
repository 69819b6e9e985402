"""One step of a model: new tokens on top of a cache, and the logits that follow."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache

from tqtool.hf.models import LoadedModel


def new_cache(loaded: LoadedModel) -> Any:
    """Return an empty cache with the layers that the model has: windows, linear layers and shared ones among them."""
    return DynamicCache(config=loaded.model.config)


def step(loaded: LoadedModel, ids: torch.Tensor, cache: Any, *, logits: int = 0) -> torch.Tensor:
    """Run token ids (1, new) on top of a cache and return the logits of the last `logits` positions, 0: of all."""
    taken = inspect.signature(loaded.model.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in taken else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in taken:
        options["logits_to_keep"] = logits
    found: torch.Tensor = loaded.model(input_ids=ids.to(loaded.device), **options).logits
    return found[:, -logits:]


def use_threads(count: int) -> None:
    """Let torch compute with so many threads."""
    torch.set_num_threads(count)
