"""Loading a model: from a folder, from nothing, and every refusal with its message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import save_tiny, tiny_model  # noqa: E402

from tqtool.errors import TqError, UsageError  # noqa: E402
from tqtool.hf.models import ModelSource, load_model  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def broken(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def test_a_folder_becomes_the_model_that_was_saved(saved: Path) -> None:
    loaded = load_model(ModelSource(str(saved)))
    assert (loaded.name, loaded.revision, loaded.architecture, loaded.layers) == (
        "tiny-llama",
        None,
        "LlamaForCausalLM",
        3,
    )
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, tiny_model("LlamaConfig")(ids).logits)
    assert loaded.tokenizer.decode(loaded.tokenizer("a byté").input_ids) == "a byté"


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_weights_take_the_type_asked_for(saved: Path, name: Any) -> None:
    types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    assert load_model(ModelSource(str(saved), torch_dtype=name)).model.dtype == types[name]


def refusal(**source: Any) -> TqError:
    with pytest.raises(TqError) as caught:
        load_model(ModelSource(**source))
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_name_that_is_no_folder_is_not_sought_anywhere_when_offline() -> None:
    error = refusal(name="owner/no-such-model", offline=True)
    assert (error.code, error.status) == ("not-found", 3)
    assert str(error) == "owner/no-such-model: no folder of this name, and --offline: it is not in the local cache"


@pytest.mark.parametrize("name", ["./tiny", "/no/such/folder", "a/b/c", ".."])
def test_a_path_is_never_taken_for_a_name_on_a_hub(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    error = refusal(name=name)
    assert str(error) in (f"{name}: no such folder", f"{name}: no config.json in this folder")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    assert str(refusal(name=str(path))) == f"{path}: is a file, not a model's folder"


def test_a_folder_without_config_names_the_gguf_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.Q4_1.gguf").write_bytes(b"x")
    error = refusal(name=str(tmp_path))
    assert (str(error), error.hint) == (
        f"{tmp_path}: no config.json in this folder",
        "there is --gguf-file a.Q4_1.gguf",
    )


def test_a_missing_gguf_file(saved: Path) -> None:
    error = refusal(name=str(saved), gguf_file="b.gguf")
    assert (error.code, str(error)) == ("not-found", f"{saved / 'b.gguf'}: no such file")


def test_no_tokenizer(saved: Path, tmp_path: Path) -> None:
    folder = broken(saved, tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    error = refusal(name=str(folder))
    assert error.code == "tokenizer"
    assert str(error).startswith(f"{folder}: no tokenizer: ")


def test_weights_that_lack_tensors_are_named_not_filled_at_random(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = broken(saved, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = refusal(name=str(folder))
    expected = f"{folder}: the weights lack 1 tensors of the model: model.layers.1.self_attn.k_proj.weight"
    assert (error.code, str(error)) == ("model", expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "bert"}, "the weights lack"),
        ({"model_type": "vit"}, "model type 'vit' is no decoder that transformers can load"),
        ({"num_attention_heads": "four"}, "cannot be loaded"),
    ],
)
def test_a_config_that_is_not_understood(saved: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = broken(saved, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    error = refusal(name=str(folder))
    assert error.code == "model"
    assert words in str(error)


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_damaged_config(saved: Path, tmp_path: Path, damage: bytes) -> None:
    folder = broken(saved, tmp_path)
    (folder / "config.json").write_bytes(damage)
    assert refusal(name=str(folder)).code == "model"


def test_damaged_weights(saved: Path, tmp_path: Path) -> None:
    folder = broken(saved, tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert refusal(name=str(folder)).code == "model"


def test_code_of_the_model_is_not_run_unasked(saved: Path, tmp_path: Path) -> None:
    folder = broken(saved, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text("raise SystemExit('this ran')\n")
    error = refusal(name=str(folder))
    assert (error.code, str(error)) == (
        "remote-code",
        f"{folder}: needs code of its own, which is run only when asked for",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:99"}, "--device cuda:99: "),
        ({"device": "toaster"}, "--device toaster: "),
        ({"revision": "main"}, "is a folder: --revision is for the hub"),
        ({"device": "cpu", "device_map": "auto"}, "--device and --device-map exclude each other"),
    ],
)
def test_options_that_have_no_meaning(saved: Path, options: dict[str, Any], words: str) -> None:
    if options.get("device_map"):
        pytest.importorskip("accelerate", reason="--device-map is accelerate's")
    error = refusal(name=str(saved), **options)
    assert isinstance(error, UsageError)
    assert words in str(error)


def test_an_empty_name() -> None:
    assert str(refusal(name="")) == "MODEL is empty: no folder and no name"
