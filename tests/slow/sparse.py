"""A file far larger than the memory allowed: 6 GiB of sparse .npy through compress and decompress in 1.5 GiB.

python tests/slow/sparse.py [GiB]        (default 6; needs about 8 GiB of disk, in TMPDIR)
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ADDRESS_SPACE = 3 << 29  # 1.5 GiB, as `ulimit -v 1572864`
ROWS = 1 << 16  # a place in a thousand holds data, the rest is a hole


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def run(*arguments: str | Path) -> str:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tqtool", *map(str, arguments)]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limited)
    assert done.stdout is not None
    said = done.stdout.read()
    _, status, usage = os.wait4(done.pid, 0)
    assert status == 0, said
    return f"{said.strip()}\n  {time.perf_counter() - begun:.1f} s, peak resident {usage.ru_maxrss // 1024} MiB"


def write_sparse(path: Path, vectors: int, *, fortran: bool) -> None:
    """Write a (8, vectors/8, 128) float32 array with data at both ends and in the middle."""
    shape = (8, vectors // 8, 128)
    header = {"descr": "<f4", "fortran_order": fortran, "shape": shape}
    block = np.random.default_rng(0).standard_normal((1024, 128)).astype("<f4").tobytes()
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        start, size = file.tell(), 4 * 128 * vectors
        file.truncate(start + size)
        for at in (0, size // 2, size - len(block)):
            file.seek(start + at)
            file.write(block)


def main(gib: float) -> None:
    vectors = int(gib * 2**30) // 512 // 8 * 8
    with tempfile.TemporaryDirectory() as name:
        for fortran in (False, True):
            folder = Path(name) / ("fortran" if fortran else "c")
            folder.mkdir()
            source = folder / "kv.npy"
            write_sparse(source, vectors, fortran=fortran)
            print(run("compress", source, "--no-progress"))
            print(run("decompress", folder / "kv.tq.safetensors", "--no-progress"))
            source_map = np.load(source, mmap_mode="r")
            back = np.load(folder / "kv.restored.npy", mmap_mode="r")
            assert back.shape == source_map.shape
            count = source_map.shape[1]
            for head, token in ((0, 0), (3, count - 1), (4, 0), (7, count - 1), (5, count // 3)):
                part = slice(max(token - 500, 0), token + 500)
                x, y = np.asarray(source_map[head, part]), np.asarray(back[head, part])
                assert np.linalg.norm(x - y) <= 0.11 * np.linalg.norm(x), (head, token)
            print("  restored within the error of 4 bits")
            del source_map, back
            source.unlink()
            (folder / "kv.restored.npy").unlink()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 6)
