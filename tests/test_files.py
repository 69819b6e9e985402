"""An output is whole or absent, replaces nothing unasked, and leaves nothing behind."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from loops import case

from tqtool import files, rawfiles
from tqtool.dumps import inputs
from tqtool.errors import InputError, OutputError, TqError, UsageError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(error: type[TqError], code: str, path: Path, *, force: bool = False) -> TqError:
    with pytest.raises(error) as caught, files.write_atomically(path, force=force) as file:
        file.write(b"new")
    assert caught.value.code == code
    assert str(caught.value).startswith(str(path))
    return caught.value


def test_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with files.write_atomically(target) as file:
        file.write(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failure_leaves_nothing(
    tmp_path: Path, error: type[BaseException], unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")
    with pytest.raises(error), files.write_atomically(tmp_path / "out") as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("unnamed", [True, False])
def test_every_way_of_publishing(tmp_path: Path, links: bool, unnamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without unnamed files, and on a file system without hard links, the promise is the same."""
    if not unnamed:
        monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")
    if not links and not unnamed:

        def no_links(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    target = tmp_path / "out"
    for content, force in ((b"one", False), (b"two", True)):
        with case(content=content, force=force):
            with files.write_atomically(target, force=force) as file:
                file.write(content)
            assert target.read_bytes() == content
    refusal(OutputError, "exists", target)
    assert names(tmp_path) == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_slower_of_two_writers_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError) as caught, files.write_atomically(target) as file:  # noqa: PT012
        file.write(b"slow")
        target.write_bytes(b"fast")
    assert caught.value.code == "exists"
    assert target.read_bytes() == b"fast"
    assert names(tmp_path) == ["out"]


def test_one_of_many_writers_wins(tmp_path: Path) -> None:
    target, refused = tmp_path / "out", []
    gate = threading.Barrier(8)

    def write(index: int) -> None:
        gate.wait()
        try:
            with files.write_atomically(target) as file:
                file.write(bytes([index]) * 1000)
        except OutputError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["exists"] * 7
    assert len(set(target.read_bytes())) == 1
    assert names(tmp_path) == ["out"]


def test_refusals_before_any_work(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    assert refusal(OutputError, "exists", target).hint == "add --force to replace it"
    assert "no such directory" in str(refusal(OutputError, "write", tmp_path / "absent" / "out"))
    assert "is a directory" in str(refusal(OutputError, "write", tmp_path, force=True))
    os.mkfifo(tmp_path / "fifo")
    assert "regular file" in str(refusal(OutputError, "write", tmp_path / "fifo", force=True))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refusal(OutputError, "exists", tmp_path / "dangling")
    assert target.read_bytes() == b"old"
    with pytest.raises(OutputError, match=r"No space left on device \(needs "):
        files.check_space(tmp_path / "big", 1 << 60)


def test_force_through_a_link_replaces_the_file_it_names(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with files.write_atomically(tmp_path / "link", force=True) as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(
    tmp_path: Path, mode: int, unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")
    target = tmp_path / "out"
    target.write_bytes(b"old")
    target.chmod(mode)
    files.write_text(target, "new", force=True)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_a_file_that_root_replaces_keeps_its_owner(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    os.chown(target, 1234, 4321)
    files.write_text(target, "new", force=True)
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 4321)


def test_long_names_of_any_alphabet_have_room_for_a_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")
    target = tmp_path / ("漢" * 80)
    files.write_text(target, "x")
    assert names(tmp_path) == [target.name]


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("call", ["fsync", "unlink"])
def test_a_failure_after_the_file_has_its_name_says_so(
    tmp_path: Path, call: str, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")
    target, original = tmp_path / "out", getattr(os, call)

    def fail(*arguments: object, **options: object) -> None:
        if target.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(*arguments, **options)

    monkeypatch.setattr(os, call, fail)
    if force and call == "unlink":  # the temporary has become the file
        files.write_text(target, "new", force=force)
    else:
        with pytest.raises(OutputError, match=r"out: is written whole, but .* failed: Input/output error") as caught:
            files.write_text(target, "new", force=force)
        assert (caught.value.code, caught.value.hint) == ("write", "it can be used; it may be lost in a power cut")
    assert target.read_bytes() == b"new"


def test_a_folder_that_cannot_be_flushed_on_this_kind_of_drive_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, target = os.fsync, tmp_path / "out"

    def some(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", some)
    files.write_text(target, "new")
    assert target.read_bytes() == b"new"


def test_a_name_held_for_a_file_that_fails_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links an empty file holds the name; if the replacement fails it may not stay."""
    monkeypatch.setattr(rawfiles, "PROC_FD", "/nonexistent")

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def no_replacing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "replace", no_replacing)
    with pytest.raises(OutputError, match="Input/output error"):
        files.write_text(tmp_path / "out", "new")
    assert names(tmp_path) == []


def test_output_that_is_the_input(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x")
    (tmp_path / "alias").hardlink_to(tmp_path / "in")
    with pytest.raises(UsageError) as caught:
        files.check_not_input(tmp_path / "alias", ["-", str(tmp_path / "in")])
    assert (caught.value.code, caught.value.status) == ("same-file", 2)


def test_inputs_are_named_when_they_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "kv.npy").write_bytes(b"x")
    (tmp_path / "empty").touch()
    cases = {"kc.npy": "not-found", "": "is-directory", "empty": "empty-file", "nul\0": "unreadable"}
    for name, code in cases.items():
        with case(name=name):
            with pytest.raises(InputError) as caught:
                inputs.open_input(f"{tmp_path}/{name}")
            assert caught.value.code == code
            if code == "not-found":
                assert caught.value.hint == f"did you mean {tmp_path / 'kv.npy'}?"


def test_a_pipe_becomes_seekable() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"through a pipe")
    os.close(writing)
    with inputs.open_input(f"/dev/fd/{reading}") as file:
        assert file.read() == b"through a pipe"
        file.seek(0)
        assert file.read(7) == b"through"
    os.close(reading)


def test_sizes_as_people_read_them() -> None:
    sizes = (0, 1023, 1024, 66 << 20, 1010 << 20, (1 << 30) - 1, 3 << 39)
    assert [files.binary_size(size) for size in sizes] == [
        "0 bytes", "1023 bytes", "1 KiB", "66 MiB", "1010 MiB", "1 GiB", "1.5 TiB"
    ]  # fmt: skip
