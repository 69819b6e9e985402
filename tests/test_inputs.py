"""An input is one version of one file, read whole; what the system refuses names it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tqtool.container.compression import compress_arrays
from tqtool.container.format import open_container
from tqtool.container.selection import Request, choose
from tqtool.dumps import inputs
from tqtool.dumps.datafiles import open_arrays, open_file
from tqtool.dumps.dump import load_dump
from tqtool.errors import InputError, OutputError
from tqtool.foreign.tables import read_tables

OLD, NEW = b"the old contents", b"the new contents"


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(NEW)
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def shortened(path: Path) -> None:
    os.truncate(path, 3)


def rewritten(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # the clock of a file system may be coarse


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "replaced": (replaced, "another file has its name now"),
    "removed": (removed, "no file has its name any more"),
    "lengthened": (lengthened, "it had 16 bytes and has 17"),
    "shortened": (shortened, "it had 16 bytes and has 3"),
    "rewritten": (rewritten, "it was written to"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "k"
    path.write_bytes(OLD)
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_not_opened_again(change: str, path: Path) -> None:
    opener, opened = inputs.reopening(path)
    with opened as file:
        assert file.read() == OLD
    with opener() as file:
        assert file.read() == OLD
    make, what = CHANGES[change]
    make(path)
    with pytest.raises(InputError) as caught, opener() as file:
        pass
    assert str(caught.value) == f"{path}: changed while it was read: {what}"
    assert (caught.value.code, caught.value.hint) == ("changed", "run it again when nothing writes to it")


@pytest.mark.parametrize("change", ["lengthened", "shortened", "rewritten"])
@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_changes_while_it_is_open_is_refused_at_the_end(change: str, again: bool, path: Path) -> None:
    opener, opened = inputs.reopening(path)
    make, what = CHANGES[change]
    with pytest.raises(InputError, match=what) as caught, opener() if again else opened:
        make(path)
    assert caught.value.code == "changed"
    opened.close()


def test_what_looks_damaged_in_a_file_that_changes_is_its_change(path: Path) -> None:
    def read(error: Exception) -> None:
        with inputs.open_input(path):
            lengthened(path)
            raise error

    with pytest.raises(InputError, match="it had 16 bytes and has 17"):
        read(InputError("damaged", code="header"))
    with pytest.raises(ZeroDivisionError):
        read(ZeroDivisionError())


def test_touching_nothing_and_hard_links_are_no_change(path: Path) -> None:
    opener, opened = inputs.reopening(path)
    with opened:
        path.with_name("twin").hardlink_to(path)
        path.chmod(0o600)
    with opener() as file:
        assert file.read() == OLD


def dump(path: Path, factor: float) -> Path:
    x = factor * np.random.default_rng(0).standard_normal((4, 2048, 128)).astype(np.float32)
    if path.suffix == ".npz":
        np.savez(path, layer0_k=x[:2], layer0_v=x[2:])
    else:
        np.save(path, x)
    return path


@pytest.mark.parametrize("name", ["k.npy", "kv.npz"])
def test_no_result_is_made_of_two_files(name: str, tmp_path: Path) -> None:
    """Reported of a reader that opens its file by name for every piece: rows half old, half new, checksums right."""
    path = dump(tmp_path / name, 1)
    first, *_ = sources = open_arrays(path)
    first.box((range(1), *map(range, first.shape[1:])))
    dump(tmp_path / f"other-{name}", 100).replace(path)
    with pytest.raises(InputError, match="another file has its name now") as caught:
        sources[-1].read()
    assert caught.value.path == str(path)


def test_compress_writes_nothing_of_a_file_that_changes(tmp_path: Path) -> None:
    path = dump(tmp_path / "k.npy", 1)
    file = open_file(path)
    output = tmp_path / "k.tq.safetensors"

    def change(amount: float) -> None:
        if (tmp_path / "other.npy").exists():
            (tmp_path / "other.npy").replace(path)

    dump(tmp_path / "other.npy", 100)
    with pytest.raises(InputError, match="changed while it was read"):
        compress_arrays(file, choose(file, Request()), output, threads=1, advance=change)
    assert not output.exists()


def test_a_container_that_changes_is_refused(tmp_path: Path) -> None:
    path, output = dump(tmp_path / "k.npy", 1), tmp_path / "k.tq.safetensors"
    file = open_file(path)
    compress_arrays(file, choose(file, Request()), output)
    container = open_container(output)
    os.truncate(output, output.stat().st_size - 1000)
    with pytest.raises(InputError, match=r"it had .* bytes and has"):
        list(container.damage())


def test_the_hash_of_a_report_is_that_of_the_bytes_measured(tmp_path: Path) -> None:
    dump(tmp_path / "kv.npz", 1)
    loaded = load_dump(tmp_path / "kv.npz")
    dump(tmp_path / "other.npz", 100).replace(tmp_path / "kv.npz")
    with pytest.raises(InputError, match="another file has its name now"):
        loaded.inputs()


@pytest.fixture
def short_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The system does a part of what it is asked: legal, and usual on network drives."""
    preadv, pwrite, used = os.preadv, os.pwrite, []

    def some_read(descriptor: int, views: list[memoryview], position: int) -> int:
        used.append("preadv")
        return preadv(descriptor, [views[0][: max(len(views[0]) * 2 // 3, 1)]], position)

    def some_written(descriptor: int, view: memoryview, position: int) -> int:
        used.append("pwrite")
        return pwrite(descriptor, view[: max(len(view) * 2 // 3, 1)], position)

    monkeypatch.setattr(os, "preadv", some_read)
    monkeypatch.setattr(os, "pwrite", some_written)
    yield used
    assert set(used) == {"preadv", "pwrite"}


def test_short_counts_change_nothing(tmp_path: Path, short_counts: list[str]) -> None:
    path, output = dump(tmp_path / "kv.npz", 1), tmp_path / "kv.tq.safetensors"
    file = open_file(path)
    compress_arrays(file, choose(file, Request()), output)
    container = open_container(output)
    assert not list(container.damage())


@pytest.mark.parametrize("method", ["read", "tell", "seek"])
def test_what_the_system_refuses_names_the_file(method: str, path: Path) -> None:
    file = inputs.open_input(path)
    os.close(file.fileno())  # behind its back: every call fails from now on
    arguments = [0] if method == "seek" else []
    with pytest.raises(InputError, match=f"^{path}: Bad file descriptor$") as caught:
        getattr(file, method)(*arguments)
    assert caught.value.code == "unreadable"
    with pytest.raises(InputError, match="Bad file descriptor"):
        file.close()


def test_no_temporary_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.close(writing)
    monkeypatch.setattr(inputs, "unnamed_temporary", full)
    with pytest.raises(OutputError, match="its temporary copy cannot be kept: No space left") as caught:
        inputs.open_input(f"/dev/fd/{reading}")
    os.close(reading)
    assert caught.value.hint == "point TMPDIR to a larger disk"


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=f"^{tmp_path}: Permission denied$") as caught:
        load_dump(tmp_path)
    assert caught.value.code == "unreadable"


def test_arrays_are_read_by_position_from_any_thread(tmp_path: Path) -> None:
    (source,) = open_arrays(dump(tmp_path / "k.npy", 1))
    assert_array_equal(source.read(), np.load(tmp_path / "k.npy"))


@pytest.mark.parametrize(
    "header",
    [
        "'<f4', 'fortran_order': False, 'shape': (18446744073709551616, 0, 0)",
        "'<f8', 'fortran_order': True, 'shape': (4611686018427387904, 0, 1)",
        "'(2,3)f4', 'fortran_order': False, 'shape': (1,)",
        "'|S0', 'fortran_order': False, 'shape': (4294967296, 16)",
        f"'<f4', 'fortran_order': False, 'shape': ({'1,' * 40})",
    ],
)
def test_headers_of_arrays_that_cannot_be_are_refused(header: str, tmp_path: Path) -> None:
    text = f"{{'descr': {header}, }}".encode()
    text += b" " * (63 - (len(text) + 10) % 64) + b"\n"
    path = tmp_path / "k.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(256))
    with pytest.raises(InputError, match="damaged NumPy header: no array has type") as caught:
        open_arrays(path)
    assert caught.value.code == "not-npy"


@pytest.mark.parametrize("text", ["-1e308, -0.06, 0.06, 0.19", "-0.19, -0.06, 0.06, 1e200"])
def test_levels_whose_squares_overflow_are_no_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "levels.txt").write_text(text)
    with pytest.raises(InputError, match="holds no table of levels"):
        read_tables(tmp_path / "levels.txt")
