"""Files of arrays: .npy, .npz, .safetensors or standard input, told apart by their first bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tqtool.dumps import npy, npz
from tqtool.dumps.arrays import FLOAT_TYPES, ArraySource
from tqtool.dumps.inputs import InputFile, naming, reopening, shown_name
from tqtool.dumps.names import CONTAINER_SUFFIX, MANIFEST, meaning
from tqtool.dumps.safetensors import array_sources, is_header, read_header
from tqtool.errors import InputError
from tqtool.files import FilePath

DumpFormat = Literal["npy", "npz", "safetensors"]  # what `open_file` reads and `decompress` writes
DUMP_FORMATS: tuple[DumpFormat, ...] = get_args(DumpFormat)
LFS_MAGIC, LFS_LIMIT = b"version https:/", 1024  # the few lines that Git keeps in place of a large file
RESTORED = ".restored"  # in the names of what `decompress` writes
ARCHIVES = (".npz", ".safetensors")
ARRAYS = (".npy", *ARCHIVES)
TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save before it wrote zip archives


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """An opened file: its arrays of every type, in its order."""

    path: str
    nbytes: int
    format: DumpFormat
    arrays: tuple[ArraySource, ...]
    metadata: dict[str, str]  # of a safetensors file
    ignored: tuple[str, ...]  # members that are no arrays


def open_file(path: FilePath, *, dtype: str | None = None, file: InputFile | None = None) -> DataFile:
    """Open a .npy, .npz or .safetensors file, or standard input (`-`); what it is, its first bytes say.

    `dtype` "bf16" takes 2-byte bits for bfloat16; `file` is the same file where it is open already. Raises:
    `InputError`, `IntegrityError`.
    """
    shown = shown_name(path)
    opener, opened = reopening(path, file)
    with opened as file:
        file.seek(0)
        start = file.read(16)
        file.seek(0)
        if start.startswith(npy.MAGIC):
            source = npy.read_npy(file, opener, shown, size=file.size, dtype=dtype)
            return DataFile(shown, file.size, "npy", (source,), {}, ())
        if start.startswith(npz.MAGICS):
            arrays, ignored = npz.read_npz(file, opener, shown, dtype=dtype)
            return DataFile(shown, file.size, "npz", arrays, {}, ignored)
        if start.startswith(LFS_MAGIC) and file.size < LFS_LIMIT:
            raise _pointer(shown)
        if is_header(start) or shown.endswith(".safetensors"):
            header = read_header(file, shown)
            if header.metadata.get("format") == "tqtool":
                raise InputError(
                    f"{shown}: is already compressed",
                    code="already-compressed",
                    hint="tqtool decompress restores it",
                    path=shown,
                )
            sources = array_sources(header, opener, shown, as_bf16=dtype == "bf16")
            return DataFile(shown, file.size, "safetensors", sources, header.metadata, ())
        raise _unknown_format(start, shown)


def open_arrays(path: FilePath, *, dtype: str | None = None) -> tuple[ArraySource, ...]:
    """Return the float arrays of a file; raises as `open_file` does, and `no-tensors` if it has none."""
    return float_arrays(open_file(path, dtype=dtype), dtype=dtype)


def float_arrays(file: DataFile, *, dtype: str | None = None) -> tuple[ArraySource, ...]:
    """Return a file's float arrays; `InputError` if there are none, saying what there is instead."""
    if file.format == "npy":
        npy.check_float(file.arrays[0], as_bf16=dtype == "bf16")
    found = tuple(source for source in file.arrays if source.dtype in FLOAT_TYPES)
    if not found:
        for source in file.arrays:
            if npy.is_eight_bit(source.dtype):
                npy.check_float(source)
        bits = any(source.store.dtype.itemsize == 2 and source.store.dtype.kind in "iuV" for source in file.arrays)
        there = listed([f"{source.name} ({source.dtype})" for source in file.arrays])
        raise InputError(
            f"{file.path}: no float arrays; found {there or 'nothing'}",
            code="no-tensors",
            hint="bfloat16 bits in 2-byte integers need --dtype bf16" if bits else None,
            path=file.path,
        )
    return found


def _unknown_format(start: bytes, shown: str) -> InputError:
    """Return the error for a file of none of the formats, naming what it seems to be."""
    if start.startswith(TORCH_MAGIC) or Path(shown).suffix in (".pt", ".pth"):
        return npy.pickled(shown, torch=True)
    if (start[:1] == b"\x80" and start[1] in range(2, 6)) or Path(shown).suffix in (".pkl", ".pickle"):
        return npy.pickled(shown, torch=False)
    known = {
        b"GGUF": "this is a GGUF model file; tqtool capture makes a dump of it",
        b"\x1f\x8b": "this is gzip; gunzip it first",
        b"\x28\xb5\x2f\xfd": "this is zstd; unpack it first",
        b"\x89HDF": "this is HDF5; convert it with h5py and np.save",
    }
    hint = next((text for magic, text in known.items() if start.startswith(magic)), None)
    text = ascii(start[:8].decode("latin-1"))
    return InputError(f"{shown}: not a NumPy file (starts with {text})", code="not-npy", hint=hint, path=shown)


def _pointer(shown: str) -> InputError:
    hint = "git lfs pull fetches the file itself"
    return InputError(f"{shown}: is a Git LFS pointer, not the data", code="lfs-pointer", hint=hint, path=shown)


def folder_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return a folder's dump files by name, and the names of its other files.

    Those are the .npy files whose names tell their kind, else the archives whose names tell a kind or layer, else all
    archives; of an array and its restored copy the array. Names that begin with a dot are companions that systems
    write beside a file (`._x.npy`), never dumps. Raises `InputError` if there are none.
    """
    chosen, names = _dump_names(folder)
    if not chosen:
        raise InputError(
            f"{folder}: no dump files; found {listed(names) if names else 'nothing'}",
            code="no-tensors",
            hint="name them like layer07_k.npy, layer07_v.npy, layer07_q.npy",
            path=str(folder),
        )
    ignored = [name for name in names if name not in chosen and name != MANIFEST]
    return [folder / name for name in chosen], ignored


def has_dump_files(folder: Path) -> bool:
    """Return whether a folder holds dump files."""
    return bool(_dump_names(folder)[0])


def _dump_names(folder: Path) -> tuple[list[str], list[str]]:
    with naming(folder):
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    shown = [name for name in names if not name.startswith(".")]
    arrays = [name for name in shown if name.endswith(".npy")]
    arrays = [name for name in arrays if name.replace(RESTORED, "") not in arrays or RESTORED not in name]
    chosen = [name for name in arrays if meaning(Path(name).stem).kind]
    if not chosen:
        archives = [name for name in shown if name.endswith(ARCHIVES) and not name.endswith(CONTAINER_SUFFIX)]
        said = {name: meaning(Path(name).stem) for name in archives}
        chosen = [name for name in archives if said[name].kind or said[name].layer is not None] or archives
    return chosen, names


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
