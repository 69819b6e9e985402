"""compress, decompress and inspect as commands: many inputs, folders, pipes, limits, JSON."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from loops import case
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

from tqtool.codec.codec import decode, encode
from tqtool.codec.spec import CodecSpec
from tqtool.dtypes import AnyArray


@pytest.fixture
def x() -> AnyArray:
    rng = np.random.default_rng(9)
    return (rng.standard_normal((2, 40, 64)) * rng.uniform(0.5, 2, (2, 40, 1))).astype(np.float32)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_line_says_what_it_cost(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    run = tqtool("compress", "kv.npy")
    assert run.returncode == 0
    assert run.stdout.startswith("kv.npy -> kv.tq.safetensors: 20.1 KiB -> ")
    for part in ("bits/value", "rel err 0.09", "of theory", "cos 0.99", " p1 ", " min ", " s\n"):
        with case(part=part):
            assert part in run.stdout
    assert run.stdout.count("\n") == 1
    back = tqtool("decompress", "kv.tq.safetensors")
    assert back.stdout.startswith("kv.tq.safetensors -> kv.restored.npy: ")
    assert_array_equal(np.load(tmp_path / "kv.restored.npy"), decode(encode(x, CodecSpec(64))))


def test_json_is_the_same_every_time_but_for_run(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    documents = [
        json.loads(tqtool("compress", "kv.npy", "--json", "-f", "--threads", threads).stdout) for threads in (1, 3)
    ]
    assert [document.pop("run").keys() for document in documents] == [{"seconds"}, {"seconds"}]
    assert documents[0] == documents[1]
    assert documents[0]["schema"] == "tqtool.compress/1"
    tensor = documents[0]["files"][0]["tensors"][0]
    assert tensor["quality"]["measured_vectors"] == 80
    assert 0.9 < tensor["quality"]["distortion_ratio"] < 1.1
    document = json.loads(tqtool("decompress", "kv.tq.safetensors", "--json").stdout)
    assert document["files"][0]["tensors"] == [{"name": "kv", "shape": [2, 40, 64], "dtype": "f32"}]


def test_through_pipes(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    command = f"cat kv.npy | {sys.executable} -m tqtool compress - | {sys.executable} -m tqtool decompress - > back.npy"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_array_equal(np.load(tmp_path / "back.npy"), decode(encode(x, CodecSpec(64))))
    assert names(tmp_path) == ["back.npy", "kv.npy"]
    assert "stdin -> -" in done.stderr


def test_a_folder_and_many_inputs(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "out").mkdir()
    for number in (0, 7):
        np.save(tmp_path / f"kv/layer{number:02d}_k.npy", x)
        np.save(tmp_path / f"kv/layer{number:02d}_v.npy", x)
    np.save(tmp_path / "kv/layer07_q_last16.npy", x[:, :16])
    np.save(tmp_path / "kv/tokens.npy", np.arange(40))
    run = tqtool("compress", "kv", "--config", "K3/V2", "-o", "out")
    assert run.returncode == 0, run.stderr
    assert "ignored layer07_q_last16.npy, tokens.npy" in run.stderr
    assert names(tmp_path / "out") == [f"layer{n}_{side}.tq.safetensors" for n in ("00", "07") for side in "kv"]
    codes = load_file(tmp_path / "out/layer07_k.tq.safetensors")["layer07_k.codes"]
    assert_array_equal(codes, encode(x, CodecSpec(64, 3)).codes)
    codes = load_file(tmp_path / "out/layer07_v.tq.safetensors")["layer07_v.codes"]
    assert_array_equal(codes, encode(x, CodecSpec(64, 2)).codes)
    back = tqtool("decompress", *sorted((tmp_path / "out").iterdir()), "--dtype", "f16", "-o", "kv/")
    assert back.returncode == 0, back.stderr
    assert np.load(tmp_path / "kv/layer00_v.restored.npy").dtype == np.float16


def test_scale_rules_and_metadata_per_side(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    save_file({"k": x, "v": x}, tmp_path / "kv.safetensors")
    options = ["-c", "k4v2", "--scale-rule", "match,unbiased", "--meta", "bf16", "--law", "sphere", "--seed", "5"]
    assert tqtool("compress", "kv.safetensors", *options).returncode == 0
    tensors = load_file(tmp_path / "kv.tq.safetensors")
    for name, bits, rule in (("k", 4, "match"), ("v", 2, "unbiased")):
        with case(name=name, bits=bits, rule=rule):
            spec = CodecSpec(64, bits, "sphere", rule, "bf16", 5)  # type: ignore[arg-type]
            encoded = encode(x, spec)
            assert_array_equal(tensors[f"{name}.codes"], encoded.codes)
            assert_array_equal(tensors[f"{name}.meta"].view("u2"), encoded.meta.view("u2"))


def test_limits_write_nothing_and_exit_1(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    for limit in (["--max-rel-error", "0.05"], ["--min-cosine", "0.999"]):
        with case(limit=limit):
            run = tqtool("compress", "kv.npy", *limit)
            assert run.returncode == 1, run.stderr
            assert run.stderr.splitlines()[-1].startswith("tqtool: error[limit]: kv.npy: kv: ")
            assert run.stderr.count("not written") == 1
            assert names(tmp_path) == ["kv.npy"]
    assert tqtool("compress", "kv.npy", "--max-rel-error", "0.2", "--min-cosine", "0.9").returncode == 0


def test_nan_to_zero_leaves_the_other_vectors_alone(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    np.save(tmp_path / "clean.npy", x)
    x[1, 3, 5], x[0, 0, 0] = np.nan, -np.inf
    np.save(tmp_path / "kv.npy", x)
    run = tqtool("compress", "kv.npy", "--nan", "zero")
    assert run.returncode == 0, run.stderr
    assert "2 values set to 0" in run.stdout
    assert tqtool("compress", "clean.npy").returncode == 0
    codes = load_file(tmp_path / "kv.tq.safetensors")["kv.codes"]
    clean = load_file(tmp_path / "clean.tq.safetensors")["clean.codes"]
    touched = {(1, 3), (0, 0)}
    for place in np.ndindex(2, 40):
        with case(place=place):
            assert (place in touched) or (codes[place] == clean[place]).all()


def test_nan_to_zero_does_not_hide_what_else_is_wrong(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    x[0, 0, 0], x[1, 2] = np.nan, 1e36
    np.save(tmp_path / "kv.npy", x)
    run = tqtool("compress", "kv.npy", "--nan", "zero")
    assert run.returncode == 3
    assert "vector [1, 2] has norm 8e+36, the limit is 2^120" in run.stderr
    assert names(tmp_path) == ["kv.npy"]


def test_warnings_before_encoding(tmp_path: Path, tqtool: Run) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64, 128)).astype(np.float32)
    np.save(tmp_path / "iid.npy", x)
    biased = x + 20
    biased[0, :7] = 0
    biased[1, 0] *= 9000
    np.save(tmp_path / "odd.npy", biased)
    np.save(tmp_path / "turned.npy", rng.standard_normal((8, 128, 512)).astype(np.float32))
    run = tqtool("compress", "iid.npy", "odd.npy", "turned.npy", "-q")
    assert run.returncode == 0
    for line in (
        "iid.npy: looks like independent normal noise",
        "odd.npy: 7 zero vectors",
        "odd.npy: norms up to 2.04",
        "odd.npy: one constant vector holds",
        "turned.npy: last axis 512 > axis of 128: is the vector axis last?",
    ):
        with case(line=line):
            assert line in run.stderr
    assert tqtool("compress", "turned.npy", "--axis", "1", "-f").stderr.count("is the vector axis last?") == 0


def test_inspect(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    save_file({"layers.3.key": x, "layers.3.value": x, "steps": np.arange(4)}, tmp_path / "kv.safetensors")
    tqtool("compress", "kv.safetensors")
    text = tqtool("inspect", "kv.tq.safetensors", "--verify").stdout
    for part in ("format 1.0", "2×40×64", "match", "copied", "every checksum matches"):
        with case(part=part):
            assert part in text
    document = json.loads(tqtool("inspect", "kv.tq.safetensors", "--json", "--verify").stdout)
    assert [tensor["name"] for tensor in document["tensors"]] == ["steps", "layers.3.key", "layers.3.value"]
    assert document["damage"] == []
    plain = json.loads(tqtool("inspect", "kv.safetensors", "--json", "--health").stdout)
    by_name = {tensor["name"]: tensor for tensor in plain["tensors"]}
    assert (by_name["layers.3.key"]["kind"], by_name["layers.3.key"]["layer"]) == ("k", 3)
    assert by_name["layers.3.key"]["health"]["zero_vectors"] == 0
    assert by_name["steps"]["health"] is None
    text = tqtool("inspect", "kv.safetensors", "--health").stdout
    assert "keys of layer 3" in text
    assert "kurtosis" in text


def test_names_of_any_bytes(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    """A file system takes any bytes as a name; tensors and terminals do not."""
    name = os.fsdecode(b"k\xff\t\xc3\xa9.npy")
    np.save(tmp_path / name, x)
    run = tqtool("compress", name, "-o", "out.tq.safetensors", encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert json.loads(tqtool("compress", name, "--json", "-o", "two.tq.safetensors").stdout)["files"]
    assert "k__é" in tqtool("inspect", "out.tq.safetensors").stdout
    assert tqtool("decompress", "out.tq.safetensors", "-o", "back.npy").returncode == 0


def test_no_name_leads_out_of_a_folder(tmp_path: Path, tqtool: Run, x: AnyArray) -> None:
    save_file({"../../k": x, "/etc/v": x}, tmp_path / "kv.safetensors")
    assert tqtool("compress", "kv.safetensors", "--bits", "4").returncode == 0
    assert tqtool("decompress", "kv.tq.safetensors", "-o", "out.npz").returncode == 0
    with np.load(tmp_path / "out.npz") as back:
        assert back.files == ["_/_/k", "_/etc/v"]


def test_binary_data_stay_off_the_terminal(tmp_path: Path, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tqtool", "compress", "kv.npy", "-o", "-"]
    done = subprocess.run(command, cwd=tmp_path, stdout=slave, stderr=subprocess.PIPE, text=True)
    os.close(slave)
    os.close(master)
    assert done.returncode == 2
    assert "error[usage]: binary data would go to the terminal" in done.stderr


def test_a_reader_that_closes_the_pipe_ends_us_quietly(tmp_path: Path, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", np.tile(x, (40, 1, 1)))
    command = f"{sys.executable} -m tqtool compress kv.npy -o - | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_process_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    """`slow/survival.py` does it 200 times, races included."""
    np.save(tmp_path / "kv.npy", np.random.default_rng(0).standard_normal((60_000, 128)).astype("f4"))
    before = (tmp_path / "kv.npy").read_bytes()
    command = [sys.executable, "-m", "tqtool", "compress", "kv.npy"]
    begun = time.perf_counter()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    lasts = time.perf_counter() - begun
    truth = (tmp_path / "kv.tq.safetensors").read_bytes()
    for share in (0.6, 0.8, 0.95):
        with case(share=share):
            (tmp_path / "kv.tq.safetensors").unlink(missing_ok=True)
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored under a shell's &
            )
            time.sleep(share * lasts)
            process.send_signal(number)
            process.communicate()
            assert process.returncode in (0, 130, -number)
            assert names(tmp_path) in (["kv.npy"], ["kv.npy", "kv.tq.safetensors"])
            if (tmp_path / "kv.tq.safetensors").exists():
                assert (tmp_path / "kv.tq.safetensors").read_bytes() == truth
    assert (tmp_path / "kv.npy").read_bytes() == before


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """`slow/sparse.py` does it with 6 GiB in 1.5 GiB; here 512 MiB may add 64 MiB to what 8 MiB take."""
    peaks = []
    for mib in (8, 512):
        with case(mib=mib):
            with (tmp_path / "kv.npy").open("wb") as file:
                shape = (mib << 11, 128)
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
                file.truncate(file.tell() + (mib << 20))
            command = [sys.executable, "-m", "tqtool", "compress", "kv.npy", "-f", "--threads", "2"]
            process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            process.stdout.read()  # type: ignore[union-attr]
            _, status, usage = os.wait4(process.pid, 0)
            process.stdout.close()  # type: ignore[union-attr]
            process.stderr.close()  # type: ignore[union-attr]
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            peaks.append(usage.ru_maxrss >> 10)
    assert peaks[1] < peaks[0] + 64, peaks
