"""The whole equality matrix: every build of the C runtime against the NumPy reference, bit for bit.

    python tests/slow/equality.py              everything: about an hour on two quiet cores
    python tests/slow/equality.py --part 20    every 20th pair of length and input type, on every build

A case is (length, input type, bits, scale rule): all lengths, three types, 1 to 8 bits, four rules; 1 to 257 vectors,
of which twenty are of the fault classes in tests/equality.py. Each goes through both instruction sets of each build, in
one thread and in two, with its scales as float32 pairs, alone, and as bfloat16. Builds: gcc and clang where present,
from -O0 to -O3 -march=native, with and without fused multiply-add, and under AddressSanitizer and
UndefinedBehaviorSanitizer. The reference runs once: its steps are put together here so that one rotation serves all
widths and rules (tests/test_runtime.py compares with the reference as it stands).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from equality import DTYPES, boundary_row, fault_rows  # noqa: E402

from tqtool.codec import reference  # noqa: E402
from tqtool.codec.packing import pack_columns  # noqa: E402
from tqtool.codec.rotation import hadamard, hadamard_inverse, signs, supported_dims  # noqa: E402
from tqtool.codec.spec import CodecSpec  # noqa: E402
from tqtool.codec.terms import METAS, SCALE_RULES  # noqa: E402
from tqtool.parallel import ordered_map  # noqa: E402

RUNTIME = ROOT / "tqtool" / "runtime"
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 64, 100, 257)
COMMON = ("-std=c99", "-shared", "-fPIC", "-DFA_TQ_NO_CODEBOOKS")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BUILDS = {
    "gcc": (
        ("-O0",),
        ("-O2",),
        ("-O3", "-march=native"),
        ("-O3", "-mfma", "-ffp-contract=fast"),
        ("-O3", "-march=native", "-ffp-contract=off"),
        ("-O2", "-DFA_TQ_PLAIN"),
        ("-O3", "-DFA_TQ_PLAIN", "-march=native", "-ffp-contract=fast"),
        SANITIZED,
    ),
    "clang": (
        ("-O0",),
        ("-O2",),
        ("-O3", "-march=native"),
        ("-O3", "-march=native", "-ffp-contract=fast"),
        ("-O2", "-DFA_TQ_PLAIN"),
        ("-O3", "-DFA_TQ_PLAIN", "-march=native", "-ffp-contract=fast"),
        ("-O1", "-fsanitize=undefined", "-fsanitize-trap=undefined"),
    ),
}


def groups(part: int) -> list[tuple[int, int, int]]:
    """(dim, type, count) of every `part`-th group; a group is 32 cases."""
    pairs = list(itertools.product(supported_dims(), range(len(DTYPES))))
    counts = np.random.default_rng(0).permutation(np.resize(COUNTS, len(pairs))).tolist()
    return [(*pair, count) for pair, count in zip(pairs, counts, strict=True)][::part]


def specs(dim: int) -> list[CodecSpec]:
    return [CodecSpec(dim, bits, scale_rule=rule, seed=dim % 7) for bits in range(1, 9) for rule in SCALE_RULES]


def digest(*arrays: np.ndarray) -> str:
    joined = hashlib.sha256()
    for array in arrays:
        joined.update(np.ascontiguousarray(array).tobytes())
    return joined.hexdigest()


def expected(rows: np.ndarray, dim: int) -> list[str]:
    """Digest of what the reference makes of rows (n, dim), in all metadata forms, for each of the specs."""
    columns = np.array(rows.T, np.float32, order="C")
    norm = reference.column_norms(columns)
    reference.normalize(columns, norm, dim % 7)
    hadamard(columns)
    digests = []
    for bits, ruled in itertools.groupby(specs(dim), key=lambda spec: spec.bits):
        boundaries, centroids = CodecSpec(dim, bits).book.tables
        indices = reference.quantize(columns, boundaries)
        codes = np.ascontiguousarray(pack_columns(indices, bits).T)
        restored = centroids.take(indices)
        hadamard_inverse(restored)
        for spec in ruled:
            scales = reference.scale_factors(spec.scale_rule, norm, columns, indices, centroids)
            half = scales.astype(ml_dtypes.bfloat16)
            decoded = [_scaled(restored, each.astype(np.float64), spec.seed) for each in (scales, half)]
            digests.append(digest(codes, scales, norm.astype(np.float32), half, *decoded))
    return digests


def _scaled(columns: np.ndarray, scales: np.ndarray, seed: int) -> np.ndarray:
    factors = scales / np.sqrt(np.float64(len(columns)))
    return (columns * factors * signs(seed, len(columns))[:, None].astype(np.float64)).astype(np.float32).T


class Library:
    """One build, called directly: what the package's binding would hide is in plain view here."""

    def __init__(self, path: str) -> None:
        header = (RUNTIME / "turboquant.h").read_text()
        text = header[header.index("/* [cdef:") : header.index("/* [end of cdef] */")]
        self.ffi = FFI()
        self.ffi.cdef(re.sub(r"^fa_tq_state \*fa_tq_init\(.*$", "", text, flags=re.MULTILINE))
        self.lib = self.ffi.dlopen(path)

    def state(self, spec: CodecSpec, tables: tuple[np.ndarray, np.ndarray], *, plain: bool) -> object:
        table = self.ffi.new("fa_tq_table *")
        table.bits, table.scale_rule = spec.bits, SCALE_RULES.index(spec.scale_rule)
        table.boundaries = self.ffi.from_buffer("float[]", tables[0])
        table.centroids = self.ffi.from_buffer("float[]", tables[1])
        state = self.ffi.gc(self.lib.fa_tq_init_with(spec.dim, table, table, spec.seed), self.lib.fa_tq_free)
        if plain:
            self.lib.fa_tq_use(state, b"plain")
        return state

    def run(
        self, rows: np.ndarray, spec: CodecSpec, tables: tuple[np.ndarray, np.ndarray], *, plain: bool, threads: int
    ) -> str:
        """Digest of what this build makes of the rows, or which of its own outputs contradict each other."""
        state, count = self.state(spec, tables, plain=plain), len(rows)
        codes, twice = (np.zeros((count, spec.code_bytes), np.uint8) for _ in range(2))
        pairs = np.zeros((count, 2), np.float32)
        alone, half = np.zeros(count, np.float32), np.zeros(count, np.uint16)
        decoded, from_half = (np.zeros((count, spec.dim), np.float32) for _ in range(2))
        cast, null = self.ffi.cast, self.ffi.NULL

        def packed(codes: np.ndarray, scales: np.ndarray, meta: str, start: int) -> object:
            floats = scales.strides[0] // scales.itemsize
            starts = (cast("void *", array.ctypes.data + start * array.strides[0]) for array in (codes, scales))
            return self.ffi.new(
                "fa_tq_packed *", (next(starts), spec.code_bytes, 0, next(starts), floats, 0, METAS.index(meta), null)
            )

        def work(bounds: tuple[int, int]) -> None:
            at, size = bounds[0], bounds[1] - bounds[0]
            source, dtype = cast("void *", rows.ctypes.data + at * rows.strides[0]), DTYPES.index(rows.dtype)
            encode, decode = self.lib.fa_tq_encode, self.lib.fa_tq_decode
            for side, to, into in (
                (True, packed(codes, pairs, "range", at), decoded),
                (False, packed(twice, alone, "f32", at), None),
                (True, packed(twice, half, "bf16", at), from_half),
            ):
                assert encode(state, side, source, dtype, size, 1, to, null) == 0
                if into is not None:
                    out = cast("float *", into.ctypes.data + at * into.strides[0])
                    assert decode(state, not side, to, size, 1, out) == 0

        if threads == 1:
            work((0, count))
        else:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(work, [(0, count // 2), (count // 2, count)]))
        if twice.tobytes() != codes.tobytes() or alone.tobytes() != pairs[:, 0].tobytes():
            return "the sides or metadata forms of one build differ"
        return digest(codes, pairs[:, 0], pairs[:, 1], half, decoded, from_half)


def check_library(path: str, prepared: Path) -> int:
    """Run all cases on one build (in a process of its own, for the sanitizers); returns the number of failures."""
    library, failures, runs = Library(path), 0, 0
    assert library.lib.fa_tq_selftest() == 0, "self-test"
    for file in sorted(prepared.glob("*.npz")):
        group = np.load(file)
        dim, dtype = (int(part) for part in file.stem.split("_"))
        rows = group["rows"].view(DTYPES[dtype])
        for spec, wanted in zip(specs(dim), group["digests"].tolist(), strict=True):
            tables = group[f"boundaries{spec.bits}"], group[f"centroids{spec.bits}"]
            for plain, threads in ((False, 1), (True, 1), (False, 2)):
                runs += 1
                if library.run(rows, spec, tables, plain=plain, threads=threads) != wanted:
                    failures += 1
                    print(f"  DIFFERENT: {spec} {rows.dtype} n={len(rows)} {plain=} {threads=}", flush=True)
    print(f"  {runs} runs, {failures} different", flush=True)
    return failures


def prepare(group: tuple[int, int, int], folder: Path) -> None:
    """Write a group's rows, tables and expected digests."""
    dim, dtype, count = group
    tables = {bits: CodecSpec(dim, bits).book.tables for bits in range(1, 9)}
    own = [boundary_row(dim, boundaries, dim % 7) for boundaries, _ in tables.values()]
    rows = fault_rows(dim, count, own, np.random.default_rng([dim, dtype]), DTYPES[dtype])
    np.savez(
        folder / f"{dim:04}_{dtype}.npz",
        rows=rows.view(np.uint32 if rows.itemsize == 4 else np.uint16),
        digests=np.array(expected(rows, dim)),
        **{f"boundaries{bits}": pair[0] for bits, pair in tables.items()},
        **{f"centroids{bits}": pair[1] for bits, pair in tables.items()},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", type=int, default=1, help="take every N-th group")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--prepared", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        return min(1, check_library(options.library, options.prepared))
    begun, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        chosen = groups(options.part)
        print(f"{32 * len(chosen)} cases; the reference computes them first", flush=True)
        with ProcessPoolExecutor() as pool:
            for _ in ordered_map(partial(prepare, folder=Path(folder)), chosen, executor=pool):
                pass
        for compiler, builds in BUILDS.items():
            if not shutil.which(compiler):
                print(f"{compiler}: not installed, skipped")
                continue
            for flags in builds:
                library = Path(folder) / "runtime.so"
                name = f"{compiler} {' '.join(flags)}"
                print(f"[{time.monotonic() - begun:.0f} s] {name}", flush=True)
                source = [str(RUNTIME / "turboquant.c"), "-lm"]
                subprocess.run([compiler, *COMMON, *flags, "-o", str(library), *source], check=True)
                environment = dict(os.environ)
                if flags is SANITIZED:
                    found = [
                        subprocess.check_output([compiler, f"-print-file-name=lib{each}.so"], text=True).strip()
                        for each in ("asan", "ubsan")
                    ]
                    environment |= {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
                again = [sys.executable, __file__, "--prepared", folder]
                if subprocess.run([*again, "--library", str(library)], env=environment, check=False).returncode:
                    failed.append(name)
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all builds equal'}; {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
