"""Builds the optional C extension: cffi in API mode, so the compiler checks every signature against turboquant.h."""

from pathlib import Path

from cffi import FFI
from setuptools import setup

RUNTIME = Path("tqtool/runtime")
OPENING, CLOSING = "/* [cdef:", "/* [end of cdef] */"


def declarations() -> str:
    """Return the part of the header between its two marks; `fa_tq_init` needs generated tables and stays out."""
    header = (RUNTIME / "turboquant.h").read_text(encoding="ascii")
    text = header[header.index(OPENING) : header.index(CLOSING)]
    lines = [line for line in text.splitlines() if not line.startswith("fa_tq_state *fa_tq_init(")]
    return "\n".join(lines)


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "tqtool.runtime._turboquant",
    '#include "turboquant.h"',
    sources=[str(RUNTIME / "turboquant.c")],
    include_dirs=[str(RUNTIME)],
    depends=[str(RUNTIME / name) for name in ("turboquant.h", "turboquant_kernels.h", "turboquant_avx512.h")],
    define_macros=[("FA_TQ_NO_CODEBOOKS", "1")],
    extra_compile_args=["-std=c99", "-O3", "-g0", "-ffp-contract=off"],
    py_limited_api=True,
)
extension = ffi.distutils_extension(verbose=False)
extension.optional = True  # without a compiler the package installs and runs on the reference

setup(ext_modules=[extension], options={"bdist_wheel": {"py_limited_api": "cp311"}})
