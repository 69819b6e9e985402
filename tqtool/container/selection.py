"""Which arrays of a file are compressed, at how many bits, and which are copied."""

from __future__ import annotations

from dataclasses import dataclass

from tqtool.codec.rotation import hadamard_order, supported_dims
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import UNTOUCHED, Law, Meta, ScaleRule
from tqtool.container.manifest import Compressed, Copied, Entry, TensorKind
from tqtool.dumps.arrays import FLOAT_TYPES, ArraySource
from tqtool.dumps.datafiles import DataFile, float_arrays, listed
from tqtool.dumps.layouts import MAX_AXES, MIN_AXES, vectors_last
from tqtool.dumps.names import meaning
from tqtool.dumps.npy import check_float
from tqtool.dumps.safetensors import STORED
from tqtool.errors import InputError, UsageError

DEFAULT_BITS = 4
DEFAULT_CONFIG = KVConfig(4, 2)  # of a file that holds keys and values


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for; None where the data decide."""

    bits: int | None = None
    config: KVConfig | None = None
    kind: TensorKind | None = None
    layout: str | None = None
    axis: int | None = None
    dtype: str | None = None
    seed: int = 0
    law: Law = "beta"
    key_scale_rule: ScaleRule = "match"  # of keys, and of what is neither
    value_scale_rule: ScaleRule = "match"
    meta: Meta = "range"
    names: tuple[str, ...] = ()

    def spec(self, source: ArraySource, kind: TensorKind, *, paired: bool) -> CodecSpec | None:
        """Return how one array is encoded, None if it is left untouched."""
        bits = self._bits(source, kind, paired=paired)
        if bits == UNTOUCHED:
            return None
        rule = self.value_scale_rule if kind == "v" else self.key_scale_rule
        return CodecSpec(source.dim, bits, self.law, rule, self.meta, self.seed)

    def _bits(self, source: ArraySource, kind: TensorKind, *, paired: bool) -> int:
        config = self.config or (DEFAULT_CONFIG if paired and self.bits is None else None)
        if config is None:
            return DEFAULT_BITS if self.bits is None else self.bits
        if kind == "generic":
            raise UsageError(
                f"{source.label}: --config {config} needs to know keys from values",
                code="usage",
                hint="name it like layer07_k or layer07_v, or add --kind k or --kind v; --bits serves any array",
                path=source.path,
            )
        return config.key_bits if kind == "k" else config.value_bits


def choose(file: DataFile, request: Request) -> tuple[tuple[Entry, ArraySource], ...]:
    """Return what becomes of each array of a file, in its order; compressed ones with their vector axis last.

    Of a file with keys or values only these are compressed, else every float array that the codec can take; all
    others are copied. `Request.names` picks arrays by name and leaves the others out. Raises: `InputError`.
    """
    arrays = _named(file, request.names) if request.names else file.arrays
    if request.names or file.format == "npy":
        for source in arrays:
            check_float(source, as_bf16=request.dtype == "bf16" and file.format == "npy")
    else:
        float_arrays(file, dtype=request.dtype)
    kinds = [_kind(source, request.kind) for source in arrays]
    sides = {kind for kind, source in zip(kinds, arrays, strict=True) if source.dtype in FLOAT_TYPES}
    cache_only = len(arrays) > 1 and bool(sides & {"k", "v"}) and not request.names
    forced = bool(request.names) or len(arrays) == 1
    chosen: list[tuple[Entry, ArraySource]] = []
    for source, kind in zip(arrays, kinds, strict=True):
        wanted = source.dtype in FLOAT_TYPES and (kind != "generic" or not cache_only)
        spec = None
        if wanted and (forced or _possible(source, request)):
            last = vectors_last(source, layout=request.layout, axis=request.axis)
            _check_dim(last)
            spec = request.spec(last, kind, paired={"k", "v"} <= sides)
        if spec is None:
            chosen.append((_copied(source), source))
        else:
            axis = source.axes.index(last.axes[-1])
            chosen.append(
                (
                    Compressed(source.name, source.dtype, source.shape, axis, kind, spec, big_endian=source.big_endian),
                    last,
                )
            )
    if not any(isinstance(entry, Compressed) for entry, _ in chosen) and not request.config:
        shapes = listed([f"{source.name} {source.shape}" for source in arrays])
        raise InputError(
            f"{file.path}: no array can be compressed; found {shapes}",
            code="no-tensors",
            hint="--name TENSOR says what is wrong with one of them",
            path=file.path,
        )
    return tuple(chosen)


def _named(file: DataFile, names: tuple[str, ...]) -> tuple[ArraySource, ...]:
    by_name = {source.name: source for source in file.arrays}
    for name in names:
        if name not in by_name:
            raise InputError(
                f"{file.path}: no array {name!r}; found {listed(list(by_name))}", code="no-tensors", path=file.path
            )
    return tuple(source for source in file.arrays if source.name in names)


def _kind(source: ArraySource, wanted: TensorKind | None) -> TensorKind:
    if wanted is not None:
        return wanted
    said = meaning(source.name).kind
    return said if said in ("k", "v") else "generic"


def _possible(source: ArraySource, request: Request) -> bool:
    """Whether an array among others can be compressed as asked; if not it is copied."""
    if not MIN_AXES <= len(source.shape) <= MAX_AXES:
        return False
    axis = request.layout.index("d") if request.layout and len(request.layout) == len(source.shape) else request.axis
    axis = -1 if axis is None else axis
    return -len(source.shape) <= axis < len(source.shape) and source.shape[axis] in supported_dims()


def _check_dim(source: ArraySource) -> None:
    try:
        hadamard_order(source.dim)
    except InputError as error:
        hint = error.hint if source.dim <= 1024 else f"{error.hint}; --axis says which axis the vectors lie along"
        raise InputError(f"{source.label}: {error}", code=error.code, hint=hint, path=source.path) from error


def _copied(source: ArraySource) -> Copied:
    if source.dtype not in FLOAT_TYPES and source.dtype.upper() not in STORED:
        raise InputError(
            f"{source.label}: dtype {source.dtype} has no place in a safetensors file",
            code="dtype",
            hint="leave it out: --name picks the arrays to compress",
            path=source.path,
        )
    return Copied(source.name, source.dtype, source.shape, source.big_endian)
