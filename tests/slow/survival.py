"""Whatever happens to the process, a file is whole under its name or not there, and the input is untouched.

python tests/slow/survival.py [kills] [interrupts] [races]      (default 200, 50 and 50; as root also a full tmpfs)
"""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MIB = 1 << 20


def start(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tqtool", *map(str, arguments)]
    # what is started in the background by a shell ignores SIGINT, and so would its children
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | heed
    return subprocess.Popen(command, **(pipes | options))  # type: ignore[call-overload, no-any-return]


def run(*arguments: str | Path, **options: object) -> tuple[int, str]:
    process = start(*arguments, **options)
    _, errors = process.communicate()
    return process.returncode, errors


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stopped(folder: Path, count: int, number: signal.Signals, rng: random.Random) -> Counter[str]:
    """Stop compress and decompress at random moments."""
    source = folder / "kv.npy"
    np.save(source, np.random.default_rng(0).standard_normal((40_000, 128)).astype("f4"))
    begun = time.perf_counter()
    assert run("compress", source)[0] == 0
    assert run("decompress", folder / "kv.tq.safetensors")[0] == 0
    lasts = (time.perf_counter() - begun) / 2
    container, restored = folder / "kv.tq.safetensors", folder / "kv.restored.npy"
    truth = {path: digest(path) for path in (source, container, restored)}
    found: Counter[str] = Counter()
    for index in range(count):
        command, output = (("compress", container), ("decompress", restored))[index % 2]
        given = source if command == "compress" else container
        kept = output.rename(folder.parent / "kept")
        process = start(command, given)
        time.sleep(rng.uniform(0, 1.1 * lasts))
        process.send_signal(number)
        _, errors = process.communicate()
        if output.exists():
            assert digest(output) == truth[output], f"{output} is not whole"
            assert files(folder) == ["kv.npy", "kv.restored.npy", "kv.tq.safetensors"], files(folder)
            found["finished before"] += 1
            kept.unlink()
        else:
            assert len(files(folder)) == 2, files(folder)
            if number == signal.SIGKILL or process.returncode == 130:
                assert process.returncode == (-9 if number == signal.SIGKILL else 130), (process.returncode, errors)
                assert "Traceback" not in errors, errors
                found["stopped"] += 1
            else:  # the interpreter itself was still starting
                assert "tqtool/cli/app" not in errors, errors
                found["stopped before it ran"] += 1
            kept.rename(output)
        assert digest(source) == truth[source]
    return found


def races(folder: Path, count: int) -> Counter[str]:
    """Let two processes want one name."""
    source = folder / "kv.npy"
    np.save(source, np.random.default_rng(0).standard_normal((20_000, 128)).astype("f4"))
    truth = []
    for seed in (1, 2):
        assert run("compress", source, "--seed", str(seed), "-o", folder / f"{seed}.tq.safetensors")[0] == 0
        truth.append((folder / f"{seed}.tq.safetensors").read_bytes())
    found: Counter[str] = Counter()
    target = folder / "wanted.tq.safetensors"
    for _ in range(count):
        both = [start("compress", source, "--seed", str(seed), "-o", target) for seed in (1, 2)]
        errors = [process.communicate()[1] for process in both]
        codes = [process.returncode for process in both]
        assert sorted(codes) == [0, 4], (codes, errors)
        assert "error[exists]" in errors[codes.index(4)]
        assert target.read_bytes() == truth[codes.index(0)], "the file is the winner's, whole"
        found[f"seed {codes.index(0) + 1} won"] += 1
        target.unlink()
    assert len(files(folder)) == 3
    return found


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tqtool-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def full_disk(folder: Path, rng: random.Random) -> Counter[str]:
    """Write to 16 MiB: too much from the start, and filled up by somebody else while we write."""
    found: Counter[str] = Counter()
    source = folder / "kv.npy"
    np.save(source, np.random.default_rng(0).standard_normal((160_000, 128)).astype("f4"))
    with tmpfs(folder / "small", 16 * MIB) as small:
        (small / "other").write_bytes(bytes(8 * MIB))
        code, errors = run("compress", source, "-o", small / "kv.tq.safetensors")
        assert code == 4, errors
        assert "No space left on device (needs 11 MiB, 8 MiB free)" in errors, errors
        assert files(small) == ["other"]
        found["refused up front"] += 1
        (small / "other").unlink()
        for _ in range(20):
            process = start("compress", source, "-o", small / "kv.tq.safetensors")
            time.sleep(rng.uniform(0.2, 2.5))
            with contextlib.suppress(OSError):
                (small / "other").write_bytes(bytes(16 * MIB))
            _, errors = process.communicate()
            if process.returncode == 0:
                (small / "kv.tq.safetensors").unlink()
                found["finished before"] += 1
            else:
                assert process.returncode == 4, errors
                assert "No space left on device" in errors
                found["filled up while writing"] += 1
            assert files(small) in ([], ["other"]), files(small)
            (small / "other").unlink(missing_ok=True)
    return found


def unwritable(folder: Path) -> str:
    """Write where one may not."""
    source, locked = folder / "kv.npy", folder / "locked"
    np.save(source, np.ones((4, 128), "f4"))
    locked.mkdir(mode=0o555)
    folder.chmod(0o755)
    without = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]  # root may write anywhere
    command = [*(without if os.getuid() == 0 else []), sys.executable, "-m", "tqtool", "compress", source]
    done = subprocess.run([*command, "-o", locked / "kv.tq.safetensors"], capture_output=True, text=True, check=False)
    code, errors = done.returncode, done.stderr
    assert code == 4, errors
    assert "Permission denied" in errors, errors
    assert files(locked) == []
    return errors.splitlines()[-1]


def main(kills: int, interrupts: int, pairs: int) -> None:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folders = iter([Path(name) / str(index) / "work" for index in range(5)])

        def new() -> Path:
            folder = next(folders)
            folder.mkdir(parents=True)
            folder.parent.chmod(0o755)
            return folder

        print("unwritable folder:", unwritable(new()))
        print(f"kill -9, {kills} times:", dict(stopped(new(), kills, signal.SIGKILL, rng)))
        print(f"SIGINT, {interrupts} times:", dict(stopped(new(), interrupts, signal.SIGINT, rng)))
        print(f"two writers, {pairs} times:", dict(races(new(), pairs)))
        if os.getuid() == 0:
            print("16 MiB tmpfs:", dict(full_disk(new(), rng)))
        else:
            print("16 MiB tmpfs: not run, mounting needs root")


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    main(*(numbers + [200, 50, 50][len(numbers) :]))
