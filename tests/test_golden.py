"""Files of every released format are decoded byte for byte, for ever; by us and by the script in docs/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import faults
import numpy as np
import pytest
from loops import case

from tqtool.container.decompression import check_damage, restore, select
from tqtool.container.format import open_container
from tqtool.errors import TqError
from tqtool.files import output_file

DATA = Path(__file__).parent / "data"
GOLDEN = sorted((DATA / "golden").glob("*.tq.safetensors"))
HOSTILE = sorted(path for path in (DATA / "hostile").iterdir())
SCRIPT = Path(__file__).parents[1] / "docs" / "decode_container.py"


def same(path: Path, golden: Path) -> None:
    with (
        np.load(path) as got,
        np.load(golden.with_name(golden.name.replace(".tq.safetensors", ".restored.npz"))) as truth,
    ):
        assert set(got.files) == set(truth.files)
        for name in truth.files:
            with case(name=name):
                assert got[name].dtype == truth[name].dtype
                assert got[name].shape == truth[name].shape
                assert got[name].tobytes() == truth[name].tobytes(), name


def test_there_is_a_file_of_format_1_0() -> None:
    assert [path.name for path in GOLDEN if "format-1.0" in path.name]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("engine", ["reference", "runtime"])
def test_decoded_byte_for_byte(golden: Path, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQTOOL_ENGINE", engine)  # without a compiled runtime both are the reference
    container = open_container(golden)
    chosen = select(container, (), "f32")
    check_damage(container, chosen)
    with output_file(tmp_path / "out.npz") as file:
        restore(container, chosen, "npz", file)
    same(tmp_path / "out.npz", golden)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_decoded_by_the_independent_script(golden: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, golden, tmp_path / "out.npz"], check=True, cwd=tmp_path)
    same(tmp_path / "out.npz", golden)
    assert "tqtool" not in SCRIPT.read_text().split('"""')[2].replace("tq_manifest", "")


def test_a_sample_of_bit_flips(tmp_path: Path) -> None:
    """`slow/damage.py` flips 5,000."""
    found = faults.flips(tmp_path, 300, seed=2)
    assert set(found) <= {"header", "checksum", "truncated", "not-container", "format-newer"}, found


def test_a_sample_of_truncations(tmp_path: Path) -> None:
    found = faults.truncations(tmp_path, 60, seed=2)
    assert set(found) <= {"truncated", "empty-file"}, found


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
def test_hostile_files_are_refused(path: Path) -> None:
    """Found by `slow/fuzz.py`; named by their fault."""
    with pytest.raises(TqError):
        faults.read_all(path)


def test_a_sample_of_fuzzing(tmp_path: Path) -> None:
    """`slow/fuzz.py` goes on for ten minutes."""
    import random

    rng = random.Random(3)
    files = [(path.name, path.read_bytes()) for path in faults.seeds(tmp_path)]
    for index in range(300):
        name, content = files[index % len(files)]
        signed = name.endswith(".tq.safetensors") and index % 2
        target = tmp_path / f"fuzzed-{name}"
        target.write_bytes(faults.signed_again(content, rng) if signed else faults.mutated(content, rng))
        faults.survives(target)
