"""Models of transformers: loaded, listened to, run with compressed caches. Only this room imports torch.

The names below are its API; the first use of one needs the extra `hf` and registers the attention function "tqtool".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_OWNERS = {"turboquant_cache": "cache", "load_cache": "storage", "save_cache": "storage"}
__all__ = ["load_cache", "save_cache", "turboquant_cache"]

if TYPE_CHECKING:
    from tqtool.hf.cache import turboquant_cache
    from tqtool.hf.storage import load_cache, save_cache


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        import_module("tqtool.hf.extra").require_extra()
        return getattr(import_module(f"tqtool.hf.{_OWNERS[name]}"), name)
    raise AttributeError(f"module 'tqtool.hf' has no attribute {name!r}")
