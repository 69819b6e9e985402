"""tqtool beside other vector quantizers on the same vectors: speed, error and bytes, on one pinned core.

    python3 -m venv .venv-bench && .venv-bench/bin/pip install -q . -r benchmarks/requirements.txt
    .venv-bench/bin/python benchmarks/peers.py

Each time is the median of five rounds that take turns. Speed is float32 bytes a second over those of memcpy of the same
array in the same run. Prints the Markdown table of the README. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from time import perf_counter

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before any library below reads it

import numpy as np  # noqa: E402

from tqtool.codec.codec import CodecSpec, decode, encode, engine  # noqa: E402
from tqtool.runtime.binding import instructions  # noqa: E402

ROUNDS = 5
SLOW = 20_000  # vectors that peers written in NumPy get: speed does not depend on the number


@dataclass(frozen=True)
class Peer:
    """One row: how to encode and decode, and what a vector occupies."""

    name: str
    rows: np.ndarray
    encode: Callable[[], object]
    decode: Callable[[object], np.ndarray] | None  # None: the library does not restore vectors
    bytes_of: Callable[[object], float]  # stored bytes a vector, metadata included
    note: str = ""


def ours(x: np.ndarray, bits: int, meta: str) -> Peer:
    spec = CodecSpec(x.shape[1], bits, meta=meta)
    out = np.empty_like(x)
    return Peer(
        f"tqtool {bits} bits, {meta}",
        x,
        lambda: encode(x, spec, threads=1),
        lambda packed: decode(packed, out=out, threads=1),
        lambda packed: packed.nbytes / len(x),
    )


def turbovec(x: np.ndarray) -> Peer:
    from turbovec import TurboQuantIndex

    def add() -> object:
        index = TurboQuantIndex(dim=x.shape[1], bit_width=4)
        index.add(x)
        return index

    label = f"turbovec {version('turbovec')}, 4 bits"
    return Peer(label, x, add, None, lambda index: len(index.to_bytes()) / len(x), "search only; error not measurable")


def faiss(x: np.ndarray, factory: str) -> Peer:
    import faiss

    faiss.omp_set_num_threads(1)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / norms
    index = faiss.index_factory(x.shape[1], factory)
    index.train(unit[:SLOW])
    return Peer(
        f"faiss {version('faiss-cpu')} `{factory}`",
        x,
        lambda: index.sa_encode(unit),
        lambda codes: index.sa_decode(codes) * norms,
        lambda codes: codes.shape[1] + 4,
        "unit vectors only: norms taken and given back outside the clock, 4 bytes counted for them",
    )


def turbo_quant_lite(x: np.ndarray) -> Peer:
    from turbo_quant_lite import TurboQuant

    coder = TurboQuant(dim=x.shape[1], bits=4)
    return Peer(
        f"turbo-quant-lite {version('turbo-quant-lite')}, 4 bits",
        x,
        lambda: coder.encode_batch(x),
        lambda made: coder.decode_batch(*made),
        lambda made: coder.compressed_size_bytes(),
        "codes are not packed by encode_batch",
    )


def q4_0(x: np.ndarray) -> Peer:
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_0
    return Peer(
        f"gguf {version('gguf')} Q4_0",
        x,
        lambda: gguf.quants.quantize(x, kind),
        lambda made: gguf.quants.dequantize(made, kind),
        lambda made: made.nbytes / len(x),
        "the Python package's NumPy code, not ggml's",
    )


def peers(x: np.ndarray) -> list[Peer]:
    rows = [ours(x, 4, "range"), ours(x, 4, "bf16"), ours(x, 3, "range"), ours(x, 2, "range")]
    if find_spec("turbovec"):
        rows.append(turbovec(x))
    if find_spec("faiss"):
        rows += [faiss(x, "RR,SQtqmse4"), faiss(x, "HR,SQtqmse4")]
    if find_spec("turbo_quant_lite"):
        rows.append(turbo_quant_lite(x[:SLOW]))
    if find_spec("gguf"):
        rows.append(q4_0(x[:SLOW]))
    return rows


def timed(job: Callable[[], object]) -> tuple[float, object]:
    start = perf_counter()
    result = job()
    return perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vectors", type=int, default=1 << 18, help="of 128 float32; beyond the caches by default")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    x = np.random.default_rng(0).standard_normal((options.vectors, 128), dtype=np.float32)
    copy = np.empty_like(x)
    rows = peers(x)
    copies: list[float] = []
    encodes: list[list[float]] = [[] for _ in rows]
    decodes: list[list[float]] = [[] for _ in rows]
    made: list[object] = [row.encode() for row in rows]  # also warms up
    for _ in range(ROUNDS):
        copies.append(timed(lambda: np.copyto(copy, x))[0])
        for i, row in enumerate(rows):
            seconds, made[i] = timed(row.encode)
            encodes[i].append(seconds)
            if row.decode:
                decodes[i].append(timed(lambda row=row, i=i: row.decode(made[i]))[0])
    bandwidth = x.nbytes / median(copies)
    print(f"engine {engine()} {instructions()}; memcpy {bandwidth / 1e9:.1f} GB/s; {len(x)} x 128 normal float32\n")
    print("| | encode Mvec/s | of memcpy | decode Mvec/s | of memcpy | relative squared error | bytes a vector |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    notes: list[str] = []
    for i, row in enumerate(rows):
        if row.note and row.note not in notes:
            notes.append(row.note)
        cells = [row.name + (f" [{notes.index(row.note) + 1}]" if row.note else "")]
        for seconds in (encodes[i], decodes[i]):
            if not seconds:
                cells += ["–", "–"]
                continue
            speed = len(row.rows) / median(seconds)
            cells += [f"{speed / 1e6:.2f}", f"{speed * row.rows.shape[1] * 4 / bandwidth:.3f}"]
        restored = row.decode(made[i]) if row.decode else None
        cells.append("–" if restored is None else f"{relative_error(restored, row.rows):.5f}")
        cells.append(f"{row.bytes_of(made[i]):.0f}")
        print("| " + " | ".join(cells) + " |")
    print()
    for number, note in enumerate(notes, 1):
        print(f"[{number}] {note}  ")


def relative_error(restored: np.ndarray, rows: np.ndarray) -> float:
    error = ((np.asarray(restored, np.float64) - rows) ** 2).sum(axis=1) / (rows.astype(np.float64) ** 2).sum(axis=1)
    return float(error.mean())


if __name__ == "__main__":
    main()
