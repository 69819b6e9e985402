"""Damage done to files on purpose, and the only two answers allowed: the truth, or a `TqError`.

The suite runs a sample; `slow/damage.py` and `slow/fuzz.py` run the numbers that issue 5 asks for.
"""

from __future__ import annotations

import json
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tqtool.codec.sizes import KVConfig
from tqtool.container.compression import compress_arrays
from tqtool.container.decompression import check_damage, restore, select
from tqtool.container.format import CHUNK, CRCS, HASH_BYTES, HASHES, hashes, is_container, open_container
from tqtool.container.selection import Request, choose
from tqtool.dumps.datafiles import open_file
from tqtool.dumps.inputs import open_input
from tqtool.errors import TqError
from tqtool.rawfiles import unnamed_temporary


def containers(folder: Path) -> tuple[Path, ...]:
    """Write small containers of every form: one tensor and a pair with copies, all metadata forms."""
    rng = np.random.default_rng(0)
    made = []
    for index, meta in enumerate(("range", "f32", "bf16")):
        source = folder / f"{index}.npy"
        np.save(source, rng.standard_normal((2, 9, 16 * (index + 1))).astype(np.float32))
        made.append((source, Request(bits=index + 2, meta=meta)))  # type: ignore[arg-type]
    pair = folder / "pair.safetensors"
    key, value = rng.standard_normal((2, 2, 7, 32)).astype(ml_dtypes.bfloat16)
    save_file({"layers.0.key": key, "layers.0.value": value, "steps": np.arange(7)}, pair, {"model": "x"})
    made.append((pair, Request(config=KVConfig(3, 2))))
    for source, request in made:
        file = open_file(source)
        compress_arrays(file, choose(file, request), source.with_suffix(".tq.safetensors"))
    return tuple(source.with_suffix(".tq.safetensors") for source, _ in made)


def decoded(path: Path) -> bytes:
    """Return everything that `decompress` would write."""
    container = open_container(path)
    chosen = select(container, (), None)
    check_damage(container, chosen, threads=1)
    with unnamed_temporary() as file:
        restore(container, chosen, "safetensors", file, threads=1)
        file.seek(0)
        return file.read()


def verdict(path: Path, truth: bytes) -> str:
    """Return how a damaged container is taken: `harmless`, or the code of the refusal. Silence is an assertion."""
    try:
        got = decoded(path)
    except TqError as error:
        assert str(error).startswith(str(path)), error  # noqa: PT017
        return error.code
    assert got == truth, f"{path}: silently wrong"
    return "harmless"


def flips(folder: Path, count: int, seed: int) -> Counter[str]:
    """Flip one random bit at a time, of each container in turn."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    files = [(path.read_bytes(), decoded(path)) for path in containers(folder)]
    target = folder / "flipped.tq.safetensors"
    for index in range(count):
        content, truth = files[index % len(files)]
        bit = rng.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        target.write_bytes(damaged)
        found[verdict(target, truth)] += 1
    return found


def truncations(folder: Path, count: int, seed: int) -> Counter[str]:
    """Cut containers short at random lengths, and at both ends of their header."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    files = [(path.read_bytes(), decoded(path)) for path in containers(folder)]
    target = folder / "cut.tq.safetensors"
    for index in range(count):
        content, truth = files[index % len(files)]
        length = rng.choice((0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content)), rng.randrange(len(content))))
        target.write_bytes(content[:length])
        found[verdict(target, truth)] += 1
    return found


def seeds(folder: Path) -> Iterator[Path]:
    """Write one good file of each format that is read."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 5, 16))
    for name, array in (
        ("f2.npy", x.astype("<f2")),
        ("f8.npy", np.asfortranarray(x.astype(">f8"))),
        ("i4.npy", x.astype("i4")),
    ):
        np.save(folder / name, array)
        yield folder / name
    np.savez(folder / "kv.npz", k=x, v=x, steps=np.arange(5))
    np.savez_compressed(folder / "kvc.npz", k=x, v=x)
    save_file({"k": x, "v": x.astype(ml_dtypes.bfloat16), "steps": np.arange(5)}, folder / "kv.safetensors")
    yield from (folder / "kv.npz", folder / "kvc.npz", folder / "kv.safetensors")
    yield from containers(folder)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the content with a few bytes changed, cut, doubled, moved or replaced by hostile numbers."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not data:
            break
        # most faults sit where the structure is: in the header at the front and the directory at the end
        span = rng.choice((16, 128, 512, len(data)))
        at = min(rng.randrange(span) if rng.random() < 0.7 else len(data) - 1 - rng.randrange(span), len(data) - 1)
        at = max(at, 0)
        match rng.randrange(8):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b"\x00\xff09-{}[](),:\"'eE.")
            case 2:
                del data[at : at + rng.choice((1, 2, 8, 64))]
            case 3:
                data[at:at] = data[at : at + rng.choice((1, 2, 8, 64))]
            case 4:
                data[at : at + 8] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 5:
                other = rng.randrange(len(data))
                data[at : at + 4], data[other : other + 4] = data[other : other + 4], data[at : at + 4]
            case 6:
                text = rng.choice(
                    (b"999999999999", b"-1", b"1e999", b"NaN", b"true", b"null", b"(((((", b"'O'", b"[[[[")
                )
                data[at : at + len(text)] = text
            case _:
                del data[at:]
    return bytes(data)


def signed_again(content: bytes, rng: random.Random) -> bytes:
    """Return a container with a mutated header, or mutated tables and metadata, under hashes that match it.

    Whoever writes a file can sign it: behind the hashes, too, no field may be believed.
    """
    length = 8 + int.from_bytes(content[:8], "little")
    header, data = content[8:length], bytearray(content[length:])
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
    if rng.random() < 0.7:
        header = mutated(header, rng)
    else:
        start, stop = places[rng.choice([name for name in places if not name.endswith(".codes")])]
        data[start:stop] = (mutated(bytes(data[start:stop]), rng) + bytes(stop))[: stop - start]
    crcs = b"".join(
        zlib.crc32(data[at : min(at + CHUNK, stop)]).to_bytes(4, "little")
        for name, (start, stop) in places.items()
        if name not in (CRCS, HASHES)
        for at in range(start, stop, CHUNK)
    )
    start, stop = places[CRCS]
    data[start:stop] = crcs
    header = len(header).to_bytes(8, "little") + header
    data[-HASH_BYTES:] = hashes(header, crcs)
    return header + bytes(data)


def read_all(path: Path) -> None:
    """Do with a file what the commands do: inspect it, compress it or restore it, all in memory."""
    with open_input(path) as file:
        container = is_container(file, path)
    if container:
        decoded(path)
        return
    file = open_file(path)
    for source in file.arrays:
        if source.nbytes < 1 << 24:
            source.read()
    chosen = choose(file, Request())
    with tempfile.TemporaryDirectory() as folder:
        compress_arrays(file, chosen, Path(folder) / "out.tq.safetensors", threads=1)


def survives(path: Path) -> str:
    """Return `read`, or the code with which a file is refused; anything else is a bug and comes out."""
    try:
        read_all(path)
    except TqError as error:
        assert error.status in (3, 4, 5), error  # noqa: PT017
        return error.code
    return "read"
