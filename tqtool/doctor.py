"""What this installation consists of, and whether it computes the right bits."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import numpy as np

from tqtool import __version__
from tqtool.codec import reference
from tqtool.codec.codebook import lloyd_max
from tqtool.codec.codec import decode, encode, engine, expected_error
from tqtool.codec.golden import golden, golden_rows
from tqtool.codec.rotation import splitmix64
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import SCALE_RULES
from tqtool.export.compiler import c_compiler
from tqtool.parallel import default_threads
from tqtool.runtime import binding as runtime

PACKAGES = ("numpy", "scipy", "typer", "rich", "jinja2", "ml_dtypes", "cffi")
EXTRAS = ("torch", "transformers", "safetensors")
CHECKED = ((64, 2), (80, 3), (96, 4), (128, 2), (128, 3), (128, 4), (160, 8), (256, 5))  # (dim, bits)
CENTROIDS_128_2 = (-0.132528415981, -0.039836513029, 0.039836513029, 0.132528415981)  # beta law
SPLITMIX64_SEED_42 = (0xBDD732262FEB6E95, 0x28EFE333B266F103)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One self-test and its outcome."""

    name: str
    fault: str  # "" if it passed


@dataclass(frozen=True, slots=True)
class Installation:
    """Versions and parts in use."""

    tqtool: str
    python: str
    platform: str
    packages: dict[str, str]
    extras: dict[str, str | None]
    engine: str
    stale: bool  # the C runtime was compiled for another version and is left alone
    instructions: str  # of the C runtime; "" where it was not compiled
    compiler: str | None  # at hand now, for `export-c --verify`
    threads: int


def installation() -> Installation:
    """Return what is installed and in use."""
    return Installation(
        tqtool=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: metadata.version(name) for name in PACKAGES},
        extras={name: metadata.version(name) if util.find_spec(name) else None for name in EXTRAS},
        engine=engine(),
        stale=runtime.stale,
        instructions=runtime.instructions(),
        compiler=" ".join(c_compiler()) or None,
        threads=default_threads(),
    )


def self_test() -> Iterator[SelfTest]:
    """Yield the outcome of each check, in about two seconds."""
    words = tuple(splitmix64(42, 2).tolist())
    yield SelfTest("signs are those of splitmix64", "" if words == SPLITMIX64_SEED_42 else f"got {words}")
    off = float(np.abs(lloyd_max(128, 2, "beta").centroids - CENTROIDS_128_2).max())
    yield SelfTest("codebook of 128 coordinates, 2 bits", "" if off < 1e-11 else f"a centroid is off by {off:.1e}")
    worst = max(_relative_error(dim, bits) / expected_error(CodecSpec(dim, bits)) for dim, bits in CHECKED)
    yield SelfTest("errors are what theory expects", "" if worst < 1.1 else f"{worst:.2f} times the expected error")
    if runtime.available():
        yield SelfTest("golden bits of every instruction set", runtime.selftest())
        yield SelfTest("runtime and reference agree on every bit", _disagreement())


def _relative_error(dim: int, bits: int) -> float:
    x = np.random.default_rng(dim).standard_normal((500, dim), dtype=np.float32)
    restored = decode(encode(x, CodecSpec(dim, bits)))
    return float((((restored - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)).mean())


def _disagreement() -> str:
    for dim, bits in CHECKED:
        spec = CodecSpec(dim, bits)
        rows = np.stack(list(golden_rows(dim, spec.boundaries, spec.seed).values()))
        expected = golden(rows, spec)
        for i, rule in enumerate(SCALE_RULES):
            ruled = CodecSpec(dim, bits, scale_rule=rule)
            ours = ruled.zeros((len(rows),))
            runtime.encode_rows(rows, ours)
            whole, same = np.empty((2, *rows.shape), np.float32)
            runtime.decode_rows(ours, whole)
            reference.decode_rows(ours, same)
            pairs = (
                (ours.codes, expected.codes),
                (ours.scales, expected.scales[:, i]),
                (ours.meta[:, 1], expected.norms),
                (whole, same),
            )
            if any(got.tobytes() != right.tobytes() for got, right in pairs):
                return f"{ruled} differs"
    return ""
