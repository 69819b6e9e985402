"""tqtool: codebooks, codec and validation for TurboQuant KV-cache compression (arXiv:2504.19874).

The names below are the library's API; each is loaded when it is first used, so `import tqtool` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_OWNERS = {
    "Codebook": "codebook",
    "lloyd_max": "codebook",
    "rotate": "rotation",
    "unrotate": "rotation",
    "pack": "packing",
    "unpack": "packing",
    "CodecSpec": "codec",
    "Encoded": "codec",
    "encode": "codec",
    "decode": "codec",
    "AttentionConfig": "attention",
    "KVCache": "cache",
    "TurboQuantCache": "cache",
    "attention_cached": "cache",
    "KVConfig": "sizes",
    "TqError": "errors",
}
__all__ = [
    "AttentionConfig",
    "Codebook",
    "CodecSpec",
    "Encoded",
    "KVCache",
    "KVConfig",
    "TqError",
    "TurboQuantCache",
    "__version__",
    "attention_cached",
    "decode",
    "encode",
    "lloyd_max",
    "pack",
    "rotate",
    "unpack",
    "unrotate",
]

if TYPE_CHECKING:
    from tqtool.attention import AttentionConfig
    from tqtool.cache import KVCache, TurboQuantCache, attention_cached
    from tqtool.codebook import Codebook, lloyd_max
    from tqtool.codec import CodecSpec, Encoded, decode, encode
    from tqtool.errors import TqError
    from tqtool.packing import pack, unpack
    from tqtool.rotation import rotate, unrotate
    from tqtool.sizes import KVConfig


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(import_module(f"tqtool.{_OWNERS[name]}"), name)
    raise AttributeError(f"module 'tqtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
