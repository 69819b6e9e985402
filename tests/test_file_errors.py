# ruff: noqa: E501, SIM223  (the table's rows stay whole)
"""Every row of the error catalogue that files can raise: code, exit status, message and hint, and its JSON."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import Run
from safetensors.numpy import save_file

import tqtool.rendering.answers.compress
import tqtool.rendering.answers.inspect  # noqa: F401  (loaded once, for all that are forked)
from tqtool.cli.app import main

Make = Callable[[Path], None]


def npy(array: np.ndarray, name: str = "kv.npy") -> Make:
    return lambda folder: np.save(folder / name, array)


def content(data: bytes, name: str = "kv.npy") -> Make:
    return lambda folder: (folder / name).write_bytes(data) and None


def with_header(descr: str, shape: str = "(3, 16)", data: bytes = b"") -> Make:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return content(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


def nothing(folder: Path) -> None:
    pass


def near_miss(folder: Path) -> None:
    np.save(folder / "kv2.npy", np.ones((2, 16)))


def object_array(folder: Path) -> None:
    np.save(folder / "kv.npy", np.array([{}, 1], object), allow_pickle=True)


def cut(folder: Path) -> None:
    np.save(folder / "kv.npy", np.ones((40, 128), np.float32))
    os.truncate(folder / "kv.npy", 5000)


def with_nan(folder: Path) -> None:
    x = np.ones((2, 4, 32, 128), np.float32)
    x[1, 2, 17, 5], x[0, 3, 30, 127] = np.nan, np.inf
    np.save(folder / "kv.npy", x)


def too_long(folder: Path) -> None:
    x = np.ones((2, 4, 16), np.float32)
    x[1, 3] = 5.3e35
    np.save(folder / "kv.npy", x)


def beyond_float32(folder: Path) -> None:
    x = np.ones((2, 4, 16))
    x[0, 2, 3] = 1e300
    np.save(folder / "kv.npy", x)


def integers(folder: Path) -> None:
    np.savez(folder / "kv.npz", steps=np.arange(4), ids=np.zeros((2, 2), np.uint16))


def torch_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "cache.pt", "w") as archive:
        archive.writestr("cache/data.pkl", b"\x80\x02.")


def bad_zip(folder: Path) -> None:
    np.savez(folder / "kv.npz", k=np.ones((4, 16)))
    os.truncate(folder / "kv.npz", 300)


def container(folder: Path) -> Path:
    from tqtool.container.compression import compress_arrays
    from tqtool.container.selection import Request, choose
    from tqtool.dumps.datafiles import open_file

    rng = np.random.default_rng(0)
    tensors = {"k": rng.standard_normal((30000, 64)).astype("f4"), "v": np.ones((40, 64), ml_dtypes.bfloat16)}
    save_file(tensors, folder / "kv.safetensors")
    file = open_file(folder / "kv.safetensors")
    compress_arrays(file, choose(file, Request()), folder / "kv.tq.safetensors")
    return folder / "kv.tq.safetensors"


def compressed(folder: Path) -> None:
    container(folder)


def overwritten(at: int, data: bytes) -> Make:
    def make(folder: Path) -> None:
        with container(folder).open("r+b") as file:
            file.seek(at)
            file.write(data)

    return make


def replaced(old: bytes, new: bytes) -> Make:
    """Exchange a text of the header for one of the same length."""

    def make(folder: Path) -> None:
        path = container(folder)
        assert path.read_bytes().count(old) == 1
        path.write_bytes(path.read_bytes().replace(old, new.ljust(len(old))))

    return make


def cut_container(folder: Path) -> None:
    path = container(folder)
    os.truncate(path, path.stat().st_size - 1000)


def damaged_chunk(folder: Path) -> None:
    path = container(folder)
    data = bytearray(path.read_bytes())
    data[-200_000] ^= 1
    path.write_bytes(data)


FLOATS = np.ones((2, 8, 128), np.float32)
DESCR_BF16, DESCR_8BIT, DESCR_F1 = "'|V2'", "'|V1'", "'<f1'"

INPUTS: dict[str, tuple[Make, list[str], str, int, str, str | None]] = {
    # what is made, the command, code, exit status, a part of the message, a part of the hint (None: no hint)
    "missing": (nothing, ["compress", "kv.npy"], "not-found", 3, "kv.npy: no such file", None),
    "nearly": (near_miss, ["compress", "kv.npy"], "not-found", 3, "kv.npy: no such file", "did you mean kv2.npy"),
    "folder": (lambda folder: (folder / "d").mkdir(), ["inspect", "d"], "is-directory", 3, "d: is a dir", "try d/*.npy"),
    "empty": (content(b""), ["compress", "kv.npy"], "empty-file", 3, "kv.npy: file is empty (0 bytes)", "interrupted?"),
    "text": (content(b"hello world"), ["compress", "kv.npy"], "not-npy", 3, "not a NumPy file (starts with 'hello", None),
    "gguf": (content(b"GGUF" * 9), ["compress", "kv.npy"], "not-npy", 3, "starts with 'GGUF", "GGUF model file"),
    "gzip": (content(gzip.compress(b"x")), ["inspect", "kv.npy"], "not-npy", 3, "not a NumPy file", "gunzip"),
    "garbage": (with_header("'<f4'", "(3, 16"), ["compress", "kv.npy"], "not-npy", 3, "damaged NumPy header", "save"),
    "negative": (with_header("'<f4'", "(-3, 16)"), ["compress", "kv.npy"], "not-npy", 3, "damaged NumPy header", "save"),
    "short": (cut, ["compress", "kv.npy"], "npy-truncated", 3, "kv.npy: holds 5000 bytes, header promises 20608", "copy"),
    "huge": (with_header("'<f4'", "(2**62, 16)".replace("2**62", str(2**62))), ["compress", "kv.npy"],
             "npy-truncated", 3, "header promises", "copy"),
    "objects": (object_array, ["compress", "kv.npy"], "object-array", 3,
                "kv.npy: object arrays need pickle, which can run code; refused", "dtype=np.float32"),
    "integers": (npy(np.ones((4, 16), np.int64)), ["compress", "kv.npy"], "dtype", 3,
                 "kv.npy: dtype int64 is not floating point", "astype(np.float32)"),
    "bits": (npy(np.ones((4, 16), np.uint16)), ["compress", "kv.npy"], "dtype", 3, "uint16 is not fl", "--dtype bf16"),
    "bools": (npy(np.ones((4, 16), bool)), ["compress", "kv.npy"], "dtype", 3, "dtype bool is not fl", "convert"),
    "complex": (npy(np.ones((4, 16), complex)), ["compress", "kv.npy"], "dtype", 3, "dtype complex128", "convert"),
    "raw": (with_header(DESCR_BF16, data=bytes(96)), ["compress", "kv.npy"], "dtype-ambiguous", 3,
            "kv.npy: 2-byte raw dtype; probably bfloat16", "add --dtype bf16"),
    "raw8": (with_header(DESCR_8BIT, data=bytes(48)), ["compress", "kv.npy"], "dtype-unsupported", 3,
             "8-bit float payloads are not supported", "float16"),
    "f1": (with_header(DESCR_F1, data=bytes(96)), ["compress", "kv.npy"], "dtype-unsupported", 3,
           "8-bit float payloads are not supported", "float16"),
    "no-bits": (npy(FLOATS), ["compress", "kv.npy", "--dtype", "bf16"], "dtype", 3, "does not apply", "leave --dtype out"),
    "0-d": (npy(np.array(1.0)), ["compress", "kv.npy"], "shape", 3, "0-D array; need (…, vectors, dim)", None),
    "1-d": (npy(np.ones(128)), ["compress", "kv.npy"], "shape", 3,
            "kv.npy: 1-D array of 128 values; need (…, vectors, dim)", "x[None, :]"),
    "7-d": (npy(np.ones((1, 1, 1, 1, 1, 2, 16))), ["compress", "kv.npy"], "shape", 3, "7-D array", None),
    "dim": (npy(np.ones((4, 90))), ["compress", "kv.npy"], "dim", 3, "90", "nearest supported: 88, 96"),
    "axis": (npy(FLOATS), ["compress", "kv.npy", "--axis", "5"], "shape", 3, "3-D array has no axis 5", None),
    "layout-axes": (npy(FLOATS), ["compress", "kv.npy", "--layout", "bhtd"], "shape", 3, "layout bhtd has 4 axes", None),
    "nan": (with_nan, ["compress", "kv.npy"], "non-finite", 3,
            "kv.npy: 1 NaN, 1 Inf; first NaN at [1, 2, 17, 5], first Inf at [0, 3, 30, 127]", "--nan zero"),
    "norm": (too_long, ["compress", "kv.npy"], "norm-range", 3,
             "kv.npy: vector [1, 3] has norm 2.1e+36, the limit is 2^120", "rescale"),
    "f64": (beyond_float32, ["compress", "kv.npy"], "norm-range", 3, "vector [0, 2] has norm 1e+300", "rescale"),
    "no-floats": (integers, ["compress", "kv.npz"], "no-tensors", 3, "kv.npz: no float arrays; found steps (i64), ids", "--dtype"),
    "no-name": (integers, ["compress", "kv.npz", "--name", "k"], "no-tensors", 3, "no array 'k'; found steps, ids", None),
    "pickle": (torch_zip, ["compress", "cache.pt"], "pickle", 3, "cache.pt: PyTorch pickle; not loaded",
               "safetensors.torch.save_file"),
    "pickle-2": (content(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "cache.pkl"), ["compress", "cache.pkl"], "pickle", 3, "PyTorch pickle; not loaded", "torch.load"),
    "pickle-3": (content(b"\x80\x04}\x94.", "cache"), ["compress", "cache"], "pickle", 3, "Python pickle; not loaded",
                 "save its arrays where it was made: np.savez"),
    "empty-zip": (lambda folder: np.savez(folder / "kv.npz"), ["compress", "kv.npz"], "no-tensors", 3, "found nothing", None),
    "no-bits-npz": (lambda folder: np.savez(folder / "kv.npz", i=np.arange(4)), ["compress", "kv.npz"], "no-tensors", 3,
                    "no float arrays; found i (i64)", None),
    "fp8": (lambda folder: save_file({"k": np.ones((4, 16), ml_dtypes.float8_e4m3fn)}, folder / "kv.safetensors"),
            ["compress", "kv.safetensors"], "dtype-unsupported", 3, "k: 8-bit float payloads", "float16"),
    "no-length": (npy(np.ones((2, 64, 0))), ["inspect", "--health", "kv.npy"], "dim", 3, "kv.npy: vectors of length 0", None),
    "no-length-2": (npy(np.ones((2, 64, 0))), ["compress", "kv.npy"], "dim", 3, "kv.npy: vectors of length 0", None),
    "dangling": (lambda folder: (folder / "kv.npy").symlink_to("gone.npy"), ["compress", "kv.npy"], "not-found", 3,
                 "kv.npy: is a link to gone.npy, which does not exist", None),
    "device": (nothing, ["compress", "/dev/zero"], "unreadable", 3, "/dev/zero: is a device", "pipe it in"),
    "device-2": (nothing, ["check-codebooks", "/dev/zero"], "unreadable", 3, "/dev/zero: is a device", "pipe it in"),
    "unfinished": (with_header("'<f4'", "(3, 16"), ["inspect", "kv.npy"], "not-npy", 3,
                   "kv.npy: damaged NumPy header: no dtype, order and shape in \"{'descr': '<f4'", "save"),
    "long-number": (content(b"\x90\x13\0\0\0\0\0\0" + b'{"k":' + b"9" * 5002 + b"}", "kv.safetensors"),
                    ["inspect", "kv.safetensors"], "header", 5, "damaged header: a number of thousands of digits", "copy"),
    "limit": (npy(FLOATS), ["compress", "kv.npy", "--min-cosine", "nan"], "usage", 2, "--min-cosine", None),
    "limit-2": (npy(FLOATS), ["compress", "kv.npy", "--min-cosine", "2"], "usage", 2, "--min-cosine", None),
    "zip": (bad_zip, ["compress", "kv.npz"], "npz-damaged", 3, "kv.npz: damaged zip archive", "copy"),
    "plain": (npy(FLOATS), ["decompress", "kv.npy"], "not-container", 3, "kv.npy: already a plain array", "did you mean compress?"),
    "plain-tensors": (compressed, ["decompress", "kv.safetensors"], "not-container", 3, "already plain", "compress?"),
    "again": (compressed, ["compress", "kv.tq.safetensors", "--force"], "already-compressed", 3, "already compressed", "decompress"),
    "exists": (lambda folder: (npy(FLOATS)(folder), content(b"old", "kv.tq.safetensors")(folder)) and None,
               ["compress", "kv.npy"], "exists", 4, "kv.tq.safetensors: already exists", "--force"),
    "same": (npy(FLOATS), ["compress", "kv.npy", "-o", "kv.npy", "--force"], "same-file", 2, "kv.npy: is the input", None),
    "no-folder": (npy(FLOATS), ["compress", "kv.npy", "-o", "no/kv.tq.safetensors"], "write", 4, "no such directory: no", None),
    "two-names": (lambda folder: (npy(FLOATS)(folder), shutil.copy(folder / "kv.npy", folder / "kv.npz")) and None,
                  ["compress", "kv.npy", "kv.npz"], "usage", 2, "two inputs would take this name", "folder"),
    "contradiction": (npy(FLOATS), ["compress", "kv.npy", "--bits", "4", "--config", "K4/V2"], "usage", 2, "contradict", None),
    "config": (npy(FLOATS), ["compress", "kv.npy", "--config", "K4/V2"], "usage", 2, "keys from values", "--kind k"),
    "bad-config": (npy(FLOATS), ["compress", "kv.npy", "--config", "4/2"], "usage", 2, "4/2", "K4/V2"),
    "bad-bits": (npy(FLOATS), ["compress", "kv.npy", "--bits", "9"], "usage", 2, "less than or equal to 8", None),
    "bad-rule": (npy(FLOATS), ["compress", "kv.npy", "--scale-rule", "best"], "usage", 2, "match, norm, lsq", None),
    "bad-layout": (npy(FLOATS), ["compress", "kv.npy", "--layout", "xyz"], "usage", 2, "nd htd thd", None),
    "long-header": (overwritten(0, (1 << 32).to_bytes(8, "little")), ["decompress", "kv.tq.safetensors"], "header", 5,
                    "kv.tq.safetensors: header of 4294967296 bytes, the limit is 104857600", None),
    "broken-header": (overwritten(20, b"\xff"), ["inspect", "kv.tq.safetensors"], "header", 5, "damaged header", "copy it again"),
    "flipped-header": (replaced(b'\\"bits\\":4', b'\\"bits\\":3'), ["decompress", "kv.tq.safetensors"], "header", 5,
                       "damaged header: hash mismatch", "copy it again"),
    "cut-container": (cut_container, ["decompress", "kv.tq.safetensors"], "truncated", 5, "header promises", "copy it again"),
    "newer": (replaced(b'"tq_version":"1.0"', b'"tq_version":"2.0"'), ["decompress", "kv.tq.safetensors"], "format-newer", 5,
              "written by format 2.0; this tqtool reads 1.x", "upgrade"),
    "feature": (replaced(b'"tq_requires":"","tq_producer":"tqtool 0.1.0"', b'"tq_requires":"entropy","tq_producer":""'),
                ["inspect", "kv.tq.safetensors"], "feature", 5, "needs feature 'entropy'", "upgrade"),
    "checksum": (damaged_chunk, ["decompress", "kv.tq.safetensors"], "checksum", 5,
                 "kv.tq.safetensors: tensor 'k.codes', chunk 1 of 1", "readable with --name: v"),
    "verify": (damaged_chunk, ["inspect", "kv.tq.safetensors", "--verify"], "checksum", 5, "CRC mismatch", "--name: v"),
}  # fmt: skip


FRESH = random.Random(5).sample(sorted(INPUTS), 8)  # these start an interpreter of their own


def forked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own that is a copy of this one: its modules are loaded already."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking: nothing else runs here
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.chdir(folder)
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.argv = ["tqtool", *arguments]
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                main()
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(child, 0)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(waited), *texts)


@pytest.mark.parametrize("name", INPUTS)
def test_refusal(name: str, tmp_path: Path, tqtool: Run) -> None:
    make, command, code, status, message, hint = INPUTS[name]
    make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = [*command, "--json", "-q"]
    run = tqtool(*arguments) if name in FRESH else forked(tmp_path, *arguments)
    errors = [line for line in run.stderr.splitlines() if "warning" not in line]
    assert run.returncode == status, run.stderr
    assert errors[0].startswith(f"tqtool: error[{code}]: "), run.stderr
    assert message in errors[0]
    assert "Traceback" not in run.stderr
    answer = json.loads(run.stdout[run.stdout.rindex('{"schema": "tqtool.error/1"') :])
    assert (answer["code"], answer["exit"]) == (code, status)
    assert errors[0].endswith(answer["message"])
    assert hint is not None or answer["hint"] is None or code == "usage"
    if hint is not None:
        assert hint in answer["hint"]
        assert hint in run.stderr
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before, "inputs are untouched and nothing is left behind"


@pytest.mark.parametrize(
    ("there", "asked", "meant"), [("c1", "zz", False), ("a", "b", False), ("kv1.npy", "kv.npy", True)]
)
def test_only_names_that_are_alike_are_suggested(
    tmp_path: Path, there: str, asked: str, meant: bool, tqtool: Run
) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 16)))
    (tmp_path / "x.npy").rename(tmp_path / there)
    assert ("did you mean" in tqtool("inspect", asked).stderr) == meant


def test_a_file_that_looks_like_an_option_is_named(tmp_path: Path, tqtool: Run) -> None:
    np.save(tmp_path / "-dash.npy", np.ones((2, 16), np.float32))
    run = tqtool("compress", "-dash.npy")
    assert (run.returncode, run.stderr.splitlines()[1]) == (2, "  hint: for the file say ./-dash.npy")
    assert tqtool("compress", "./-dash.npy").returncode == 0


def test_a_folders_archives_of_other_names_are_ignored(tmp_path: Path, tqtool: Run) -> None:
    (tmp_path / "d").mkdir()
    for side in "kv":
        np.savez(tmp_path / f"d/layer0_{side}.npz", **{f"layer0_{side}": np.ones((2, 64, 64), np.float32)})
    (tmp_path / "d/other.safetensors").write_bytes(b"\x10" + bytes(7) + b"{garbage garbage")
    run = tqtool("compress", "d")
    assert run.returncode == 0, run.stderr
    assert "d: ignored other.safetensors" in run.stderr


def test_names_do_not_act_on_the_terminal(tmp_path: Path, tqtool: Run) -> None:
    name, shown = "a\x1b[31m\nb", r"a\u001b[31m\nb"
    np.save(tmp_path / f"{name}.npy", np.zeros((2, 64), np.float32))
    np.savez(tmp_path / "kv.npz", **{name: np.ones((2, 64), np.float32)})
    with zipfile.ZipFile(tmp_path / "kv.npz", "a") as archive:
        archive.writestr(name, "x")
    (tmp_path / name).write_bytes(b"hello world")
    for arguments in (
        ["inspect", f"{name}.npy"],
        ["inspect", "kv.npz"],
        ["compress", f"{name}.npy"],
        ["inspect", f"{name}.tq.safetensors"],
        ["decompress", f"{name}.tq.safetensors"],
        ["compress", f"{name}.npy"],  # exists
        ["compress", name],
        ["check-codebooks", name],
        ["inspect", name + "?"],  # the hint names it
    ):
        run = tqtool(*arguments, "--color", "always")
        printed = re.sub("\x1b\\[(31|33|0)m(?=error|warning|:)", "", run.stdout + run.stderr)  # our own
        assert shown in printed, arguments
        assert "\x1b" not in printed, arguments
        assert "\nb" not in printed, arguments
