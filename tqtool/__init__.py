"""tqtool: codebooks, codec and validation for TurboQuant KV-cache compression (arXiv:2504.19874).

The names below are the library's API; each is loaded when it is first used, so `import tqtool` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_OWNERS = {
    "Codebook": "codec.codebook",
    "lloyd_max": "codec.codebook",
    "rotate": "codec.rotation",
    "unrotate": "codec.rotation",
    "pack": "codec.packing",
    "unpack": "codec.packing",
    "CodecSpec": "codec.spec",
    "Encoded": "codec.spec",
    "encode": "codec.codec",
    "decode": "codec.codec",
    "AttentionConfig": "attention.plain",
    "KVCache": "attention.cache",
    "TurboQuantCache": "attention.cache",
    "attention_cached": "attention.cache",
    "KVConfig": "codec.sizes",
    "TqError": "errors",
    "load_dump": "dumps.dump",
    "Params": "report.params",
    "from_arrays": "validation.dataset",
    "from_dump": "validation.dump_data",
    "validate": "validation.run",
    "Request": "container.selection",
    "compress_file": "container.whole_files",
    "decompress_file": "container.whole_files",
}
__all__ = [
    "AttentionConfig",
    "Codebook",
    "CodecSpec",
    "Encoded",
    "KVCache",
    "KVConfig",
    "Params",
    "Request",
    "TqError",
    "TurboQuantCache",
    "__version__",
    "attention_cached",
    "compress_file",
    "decode",
    "decompress_file",
    "encode",
    "from_arrays",
    "from_dump",
    "lloyd_max",
    "load_dump",
    "pack",
    "rotate",
    "unpack",
    "unrotate",
    "validate",
]

if TYPE_CHECKING:
    from tqtool.attention.cache import KVCache, TurboQuantCache, attention_cached
    from tqtool.attention.plain import AttentionConfig
    from tqtool.codec.codebook import Codebook, lloyd_max
    from tqtool.codec.codec import decode, encode
    from tqtool.codec.packing import pack, unpack
    from tqtool.codec.rotation import rotate, unrotate
    from tqtool.codec.sizes import KVConfig
    from tqtool.codec.spec import CodecSpec, Encoded
    from tqtool.container.selection import Request
    from tqtool.container.whole_files import compress_file, decompress_file
    from tqtool.dumps.dump import load_dump
    from tqtool.errors import TqError
    from tqtool.report.params import Params
    from tqtool.validation.dataset import from_arrays
    from tqtool.validation.dump_data import from_dump
    from tqtool.validation.run import validate


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(import_module(f"tqtool.{_OWNERS[name]}"), name)
    raise AttributeError(f"module 'tqtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
