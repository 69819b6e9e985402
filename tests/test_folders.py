"""What lies in real folders: companions of files, pointers, an archive a layer, appended arrays, integer bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from loops import case
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from tqtool.dumps.datafiles import open_arrays, open_file
from tqtool.dumps.dump import load_dump, load_dumps
from tqtool.errors import TqError

HEADS = (("k", 2), ("v", 2), ("q", 4))


def layer(number: int, tokens: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {kind: rng.standard_normal((heads, tokens, 64)).astype(np.float32) for kind, heads in HEADS}


@pytest.mark.parametrize("companion", ["._layer00_k.npy", ".nfs0001_k.npy", ".~layer00_v.npy", ".#layer00_q.npy"])
def test_companions_of_files_are_no_dumps(tqtool: Run, tmp_path: Path, companion: str) -> None:
    for kind, x in layer(0).items():
        np.save(tmp_path / f"layer00_{kind}.npy", x)
    (tmp_path / companion).write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(99))
    assert any(f"ignored {companion}" in note for note in load_dump(tmp_path).notes)
    result = tqtool("compress", ".", "-o", "out/") if (tmp_path / "out").mkdir() is None else None
    assert result is not None
    assert result.returncode == 0
    assert f"ignored layer00_q.npy, {companion}" in result.stderr or companion in result.stderr


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_pointer_says_how_to_fetch_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"layer00_k.{suffix}"
    path.write_text("version https://example/spec/v1\noid sha256:00\nsize 1048704\n")
    with pytest.raises(TqError, match="is a Git LFS pointer, not the data") as caught:
        open_file(path)
    assert (caught.value.code, caught.value.hint) == ("lfs-pointer", "git lfs pull fetches the file itself")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_one_archive_a_layer_takes_the_number_of_its_name(tmp_path: Path, suffix: str) -> None:
    for number in (0, 7):
        if suffix == "npz":
            np.savez(tmp_path / f"layer_{number:02d}.npz", **layer(number))
        else:
            save_file(layer(number), tmp_path / f"layer_{number:02d}.safetensors")
    dump = load_dump(tmp_path)
    assert [each.number for each in dump.layers] == [0, 7]
    assert_array_equal(dump.layers[1].arrays()[1], layer(7)["k"])


def test_the_only_member_of_an_archive_is_what_the_file_says(tmp_path: Path) -> None:
    for kind, x in layer(3).items():
        np.savez(tmp_path / f"layer03_{kind}.npz", x)  # NumPy names the member arr_0
    assert_array_equal(load_dump(tmp_path).layers[0].arrays()[2], layer(3)["v"])


def test_two_arrays_for_one_place_are_named_with_their_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.npz" for name in ("one", "two")]
    np.savez(paths[0], **layer(0))
    np.savez(paths[1], **layer(1))
    with pytest.raises(TqError) as caught:
        load_dump(paths)
    assert caught.value.code == "ambiguous"
    assert f"{paths[0]}: k and {paths[1]}: k both are the keys" in str(caught.value)


@pytest.mark.parametrize("archived", [False, True])
def test_an_array_after_the_array_is_not_dropped(tmp_path: Path, archived: bool) -> None:
    path = tmp_path / "layer00_k.npy"
    with path.open("wb") as file:
        for tokens in (64, 32):
            np.save(file, np.ones((2, tokens, 64), np.float32))
    if archived:
        import zipfile

        with zipfile.ZipFile(tmp_path / "layer00.npz", "w") as archive:
            archive.write(path, "k.npy")
        path = tmp_path / "layer00.npz"
    with pytest.raises(TqError, match=f"{128 + 2 * 32 * 64 * 4} bytes follow the array \\(2, 64, 64\\)") as caught:
        open_file(path)
    assert caught.value.code == "npy-trailing"
    assert "load the arrays one by one" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["i2", ">i2", "u2", ">u2"])
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_integers_of_two_bytes_are_bfloat16_when_asked(tmp_path: Path, kind: str, suffix: str) -> None:
    x = np.random.default_rng(110).standard_normal((2, 64, 64)).astype(np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    stored = bits.astype("<i2").astype(kind) if "i" in kind else bits.astype(kind)
    path = tmp_path / f"layer00_k.{suffix}"
    if suffix == "npy":
        np.save(path, stored)
    elif suffix == "npz":
        np.savez(path, k=stored)
    else:
        save_file({"k": stored.astype(stored.dtype.newbyteorder("="))}, path)
    with pytest.raises(TqError) as caught:
        open_arrays(path)
    assert "--dtype bf16" in str(caught.value.hint)
    (source,) = open_arrays(path, dtype="bf16")
    assert_array_equal(source.read().astype(np.float32), (bits.astype(np.uint32) << 16).view(np.float32))


MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tqtool.dumps.dump import load_dump, load_dumps
dump = load_dump("many.npz")
for layer in dump.layers:
    assert layer.arrays()[1].shape == (2, 8, 64)
dump.inputs()
print(len(dump.layers))
"""


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_many_members_needs_few_descriptors(tmp_path: Path, save: Any) -> None:
    arrays = {f"layer{i:02d}_{kind}": x for i in range(40) for kind, x in layer(i, tokens=8).items()}
    save(tmp_path / "many.npz", **arrays)
    result = subprocess.run(
        [sys.executable, "-c", MANY], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stdout.strip()) == (0, "40"), result.stderr[-500:]


def prompts(folder: Path, *names: str, layers: int = 2, tokens: int = 40) -> None:
    for place, name in enumerate(names):
        (folder / name).mkdir()
        for number in range(layers):
            for kind, x in layer(100 * place + number, tokens).items():
                np.save(folder / name / f"layer{number:02d}_{kind}.npy", x)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["."], ["a", "b"]),
        (["a/*", "b/*"], ["a", "b"]),
        (["a"], ["a"]),
        (["a/layer00_k.npy", "a/layer00_v.npy"], ["a/layer00_k.npy, a/layer00_v.npy"]),
    ],
)
def test_dumps_of_the_same_layers_are_dumps_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path, "a", "b", tokens=140)
    given = [str(path) for text in paths for path in (sorted(Path().glob(text)) if "*" in text else [text])]
    assert [dump.name for dump in load_dumps(given)] == expected


def test_parts_of_one_model_are_one_dump(tmp_path: Path) -> None:
    prompts(tmp_path, "a", "b", layers=1)
    for kind, _ in HEADS:
        (tmp_path / "b" / f"layer00_{kind}.npy").rename(tmp_path / "b" / f"layer05_{kind}.npy")
    (dump,) = load_dumps([tmp_path / "a", tmp_path / "b"])
    assert [each.number for each in dump.layers] == [0, 5]


def test_archives_of_one_folder_that_hold_the_same_layers_are_dumps(tmp_path: Path) -> None:
    for name in ("one", "two"):
        np.savez(tmp_path / f"{name}.npz", **{f"layer0_{kind}": x for kind, x in layer(len(name)).items()})
    assert [Path(dump.name).name for dump in load_dumps([tmp_path])] == ["one.npz", "two.npz"]


def test_a_dump_given_twice_is_refused(tmp_path: Path) -> None:
    prompts(tmp_path, "a")
    with pytest.raises(TqError, match="is given twice"):
        load_dumps([tmp_path / "a", tmp_path / "a"])


def test_several_texts_give_one_report_with_an_interval_over_them(tqtool: Run, tmp_path: Path) -> None:
    prompts(tmp_path, "a", "b", "c")
    options = ("-c", "K4/V4,K3/V2", "--json-out", "r.json", "--html-out", "r.html", "--markdown-out", "r.md")
    result = tqtool("validate", "a", "b", "c", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [source["name"] for source in report["sources"]] == ["a", "b", "c"]
    assert [each["config"] for each in report["prompts"] if each["metric"] == "kl"] == ["K4/V4", "K3/V2"]
    for each in report["prompts"]:
        rows = [row for row in report["rows"] if row["config"] == each["config"]]
        means = np.array([row["metrics"][each["metric"]]["mean"] for row in rows])
        half = 4.302652729911275 * means.std(ddof=1) / np.sqrt(3)  # Student's t at 0.975 with 2 degrees: a table's
        expected = [means.mean(), means.mean() - half, means.mean() + half]
        worst = means.min() if each["metric"] == "cos" else means.max()
        with case(config=each["config"], metric=each["metric"]):
            np.testing.assert_allclose([each["mean"], each["ci_low"], each["ci_high"]], expected, rtol=1e-7)
            assert (each["worst"], each["worst_source"]) == (worst, "abc"[list(means).index(worst)])
    pages = [result.stdout, (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()]
    title = "Over 3 dumps, each a text: mean and 95 % interval of the mean over texts"
    assert [title in page for page in pages] == [True] * 3


def test_dumps_of_two_models_are_no_sample_of_texts(tqtool: Run, tmp_path: Path) -> None:
    prompts(tmp_path, "a", layers=2)
    prompts(tmp_path, "b", layers=1)
    result = tqtool("validate", "a", "b", "-c", "K4/V4", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["prompts"] == []


@pytest.mark.parametrize("option", [("--layout", "htd"), ("--dtype", "bf16")])
def test_an_option_for_a_dump_needs_one(tqtool: Run, option: tuple[str, str]) -> None:
    result = tqtool("validate", *option)
    assert result.returncode == 2
    assert "--layout and --dtype have no meaning without a dump" in result.stderr
