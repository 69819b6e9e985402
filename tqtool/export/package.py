"""The folder that engines receive: tables, the runtime that this package runs, an adapter, tests and an example."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from tqtool import __version__
from tqtool.codec.golden import Golden, golden, golden_rows
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import Law
from tqtool.errors import UsageError
from tqtool.export.header import codebook_header
from tqtool.templating import template, template_text

PER_LINE = 8  # words on a line of tq_golden.h; twice as many bytes


def export_files(dims: Sequence[int], bits: Sequence[int], law: Law = "beta", seed: int = 0) -> dict[str, str]:
    """Return name -> text of every file of the exported folder.

    Raises: `InputError` for an unsupported length, `UsageError` for a width beyond 4 bits or an invalid seed.
    """
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed {seed}: a C literal takes 0 to 2^63 - 1", code="usage")
    lists = f"--dims {','.join(map(str, dims))} --bits {','.join(map(str, bits))}"
    command = f"tqtool export-c DIR {lists} --law {law} --seed {seed}"
    default = () if {2, 4} <= set(bits) else (max(bits), min(bits))
    return {
        "tq_codebooks.h": codebook_header(dims, bits, law),
        "turboquant.h": _runtime("turboquant.h"),
        "turboquant.c": _runtime("turboquant.c"),
        "turboquant_kernels.h": _runtime("turboquant_kernels.h"),
        "turboquant_avx512.h": _runtime("turboquant_avx512.h"),
        "fa_tq_adapter.h": template_text("fa_tq_adapter.h"),
        "tq_example.c": template_text("tq_example.c"),
        "test_turboquant.c": template_text("test_turboquant.c"),
        "tq_golden.h": golden_header(dims, bits, law, seed, command),
        "Makefile": template_text("export_Makefile"),
        "README.md": _render(
            "export_README.md.j2", command=command, dims=dims, bits=bits, law=law, seed=seed, default_bits=default
        ),
    }


def golden_header(dims: Sequence[int], bits: Sequence[int], law: Law, seed: int, command: str) -> str:
    """Return the text of tq_golden.h."""
    rows_of = {}
    cases = []
    names: list[str] = []
    for dim in dims:
        rows = golden_rows(dim, CodecSpec(dim, max(bits), law).boundaries, seed)
        names = list(rows)
        stacked = np.stack(list(rows.values()))
        rows_of[dim] = [_lines(row.view(np.uint32), "0x{:08x}u", PER_LINE) for row in stacked]
        cases += [_case(golden(stacked, CodecSpec(dim, width, law, seed=seed))) for width in bits]
    return _render("tq_golden.h.j2", command=command, names=names, seed=seed, rows_of=rows_of, cases=cases)


def _case(made: Golden) -> dict[str, object]:
    results = np.column_stack([made.scales.view(np.uint32), made.norms.view(np.uint32), made.decoded_crc32])
    return {
        "dim": made.dim,
        "bits": made.bits,
        "codes": [line for row in made.codes for line in _lines(row, "0x{:02x}", 2 * PER_LINE)],
        "results": [[f"0x{word:08x}u" for word in row] for row in results.tolist()],
    }


def _lines(values: NDArray[np.unsignedinteger], form: str, size: int) -> list[str]:
    words = [form.format(value) for value in values.tolist()]
    return [", ".join(words[i : i + size]) for i in range(0, len(words), size)]


def _runtime(name: str) -> str:
    return (resources.files("tqtool.runtime") / name).read_text("utf-8")


def _render(name: str, **values: object) -> str:
    return template(name)(version=__version__, **values)
