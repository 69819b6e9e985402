"""End to end against the codec alone: compress and decompress of a file in the page cache, in one process.

python tests/slow/throughput.py [GiB] [rounds]      (default 1 and 5; twice the size of disk, in TMPDIR)
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tqtool.codec.codec import decode, encode, engine
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.container.compression import compress_arrays
from tqtool.container.decompression import check_damage, restore, select
from tqtool.container.format import open_container
from tqtool.container.selection import Request, choose
from tqtool.dumps.datafiles import open_file
from tqtool.files import write_atomically
from tqtool.parallel import default_threads


def main(gib: float, rounds: int) -> None:
    vectors = int(gib * 2**30) // 512
    with tempfile.TemporaryDirectory() as name:
        source, target, back = (Path(name) / each for each in ("kv.npy", "kv.tq.safetensors", "back.npy"))
        x = np.random.default_rng(0).standard_normal((vectors, 128), dtype=np.float32)
        np.save(source, x)
        spec = CodecSpec(128)
        encoded = encode(x[:4096], spec)
        file = open_file(source)
        chosen = choose(file, Request())

        def encode_alone() -> None:
            nonlocal encoded
            encoded = encode(x, spec)

        def compress(stats: str) -> Callable[[], None]:
            return lambda: compress_arrays(file, chosen, target, stats=stats, force=True) and None  # type: ignore[arg-type]

        def decode_alone() -> None:
            decode(Encoded(spec, encoded.codes, encoded.meta))

        def decompress() -> None:
            container = open_container(target)
            everything = select(container, (), None)
            check_damage(container, everything)
            with write_atomically(back, force=True) as out:
                restore(container, everything, "npy", out)

        steps: dict[str, Callable[[], None]] = {
            "encode, in memory": encode_alone,
            "compress": compress("sample"),
            "compress --no-stats": compress("none"),
            "decode, in memory": decode_alone,
            "decompress": decompress,
        }
        best = dict.fromkeys(steps, (np.inf, np.inf))
        for _ in range(rounds):
            for step, run in steps.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                took = (time.perf_counter() - wall, time.process_time() - cpu)
                best[step] = (min(best[step][0], took[0]), min(best[step][1], took[1]))
        print(
            f"{gib:g} GiB of float32, d = 128, 4 bits, engine {engine()}, {default_threads()} threads, best of {rounds}"
        )
        for step, (wall, cpu) in best.items():
            alone = best["encode, in memory"] if step.startswith(("encode", "compress")) else best["decode, in memory"]
            share = f"{alone[0] / wall:.0%} of the codec by the clock, {alone[1] / cpu:.0%} by processor time"
            print(f"{step:<20} {x.nbytes / wall / 1e9:.2f} GB/s  {share}")


if __name__ == "__main__":
    numbers = [float(text) for text in sys.argv[1:]] + [1, 5][len(sys.argv) - 1 :]
    main(numbers[0], int(numbers[1]))
