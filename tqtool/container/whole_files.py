"""From one file to another, in one call: what the commands `compress` and `decompress` do, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from tqtool.container.compression import Limits, Result, compress_arrays
from tqtool.container.decompression import Restored, check_damage, form_of, restore, restored_size, select
from tqtool.container.format import open_container
from tqtool.container.pipeline import Stats
from tqtool.container.selection import Request, choose
from tqtool.dumps.datafiles import open_file
from tqtool.files import FilePath, check_not_input, check_output, output_file


def compress_file(
    source: FilePath,
    output: FilePath,
    request: Request | None = None,
    *,
    stats: Stats = "sample",
    nan_to_zero: bool = False,
    limits: Limits | None = None,
    force: bool = False,
    threads: int | None = None,
) -> Result:
    """Compress the arrays of a .npy, .npz or .safetensors file and return what it cost.

    `request` says how; by default keys and values of one file become K4/V2, other arrays 4 bits. `stats` says of how
    many vectors the error is measured, `limits` what it may be: beyond that nothing is written and `exceeded` of the
    result says why. `force` replaces a file that is there.

    Raises: `InputError` for arrays that cannot be compressed, `OutputError`, `UsageError` for a contradiction.
    """
    check_not_input(output, [str(source)])
    check_output(output, force=force)
    request = request or Request()
    file = open_file(source, dtype=request.dtype)
    return compress_arrays(
        file,
        choose(file, request),
        output,
        stats=stats,
        nan_to_zero=nan_to_zero,
        limits=limits or Limits(),
        force=force,
        threads=threads,
    )


def decompress_file(
    source: FilePath,
    output: FilePath,
    *,
    names: Sequence[str] = (),
    dtype: str | None = None,
    verify: bool = True,
    force: bool = False,
    threads: int | None = None,
) -> tuple[Restored, ...]:
    """Restore the arrays of a compressed file, or those of `names`, and return which they were.

    The suffix of `output` decides its format, else the format of the source. `dtype` is "f32", "f16" or "bf16", or None
    for what the source had. `verify` checks every checksum first. `force` replaces a file that is there.

    Raises: `IntegrityError` for a damaged file, `InputError`, `OutputError`, `UsageError` for a name it does not hold.
    """
    check_not_input(output, [str(source)])
    check_output(output, force=force)
    container = open_container(source)
    form = form_of(str(output), container)
    chosen = select(container, names, dtype)
    if verify:
        check_damage(container, chosen, threads)
    with output_file(output, force=force, size=restored_size(chosen, form)) as file:
        restore(container, chosen, form, file, threads=threads)
    return chosen
