"""Speed of the NumPy reference by block size, as a fraction of memcpy, one thread.

Run: python benchmarks/reference_blocks.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

os.environ["TQTOOL_ENGINE"] = "reference"

from tqtool import CodecSpec, decode, encode
from tqtool.codec import reference


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of several runs in seconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    x = np.random.default_rng(0).standard_normal((200_000, 128)).astype(np.float32)
    copy = np.empty_like(x)
    copying = best(lambda: np.copyto(copy, x))
    spec = CodecSpec(128, 4)
    encoded = encode(x, spec)
    print(f"memcpy {x.nbytes / copying / 1e9:.1f} GB/s; d = 128, 4 bits, one thread")
    print("block KiB  encode Mvec/s  of memcpy  decode Mvec/s  of memcpy")
    for kib in (256, 512, 1024, 2048, 4096, 8192):
        reference.BLOCK_BYTES = kib << 10
        forth = best(lambda: encode(x, spec, threads=1))
        back = best(lambda: decode(encoded, threads=1))
        million = len(x) / 1e6
        print(f"{kib:9} {million / forth:14.3f} {copying / forth:10.4f} {million / back:14.3f} {copying / back:10.4f}")


if __name__ == "__main__":
    main()
