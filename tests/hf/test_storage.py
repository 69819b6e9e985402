"""A cache saved and loaded: the same numbers, in this process or another; every refusal with its message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import tiny_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from tqtool.errors import TqError  # noqa: E402
from tqtool.hf import load_cache, save_cache, turboquant_cache  # noqa: E402

GEMMA: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
MODELS = {"LlamaConfig": {"head_dim": 32}, "Gemma3TextConfig": GEMMA}
RULES = {"residual_window": 3, "sink_tokens": 2, "meta": "range"}


def filled(model: Any, **rules: Any) -> DynamicCache:
    cache = turboquant_cache(model.config, "K4/V2", **rules)
    with torch.no_grad():
        model(torch.arange(3, 33)[None], cache=cache)
    return cache


def going_on(model: Any, cache: DynamicCache) -> Any:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([[token]]), cache=cache).logits for token in (5, 9, 2)], 1)


@pytest.mark.parametrize("protect", [(), (1,)])
@pytest.mark.parametrize("config", MODELS)
def test_a_loaded_cache_goes_on_as_the_saved_one(config: str, protect: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny_model(config, **MODELS[config])
    cache = filled(model, protect=protect, **RULES)
    save_cache(cache, tmp_path / "prompt.tq.safetensors")
    loaded = load_cache(tmp_path / "prompt.tq.safetensors", model.config)
    assert loaded.get_seq_length() == 30
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert torch.equal(going_on(model, loaded), going_on(model, cache))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_come_back(dtype: str, tmp_path: Path) -> None:
    model = tiny_model("Gemma3TextConfig", **GEMMA).to(getattr(torch, dtype))
    cache = filled(model)
    save_cache(cache, tmp_path / "prompt.tq.safetensors")
    loaded = load_cache(tmp_path / "prompt.tq.safetensors", model.config)
    assert torch.equal(going_on(model, loaded), going_on(model, cache))


def test_another_process_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    model = tiny_model("LlamaConfig", head_dim=32)
    cache = filled(model, **RULES)
    save_cache(cache, tmp_path / "prompt.tq.safetensors")
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "import numpy, torch; torch.set_num_threads(1)\n"
        "from test_storage import going_on, tiny_model\n"
        "from tqtool.hf import load_cache\n"
        "model = tiny_model('LlamaConfig', head_dim=32)\n"
        "numpy.save('logits.npy', going_on(model, load_cache('prompt.tq.safetensors', model.config)).numpy())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), going_on(model, cache).numpy())


def test_inspect_and_decompress_read_it(tmp_path: Path) -> None:
    cache = filled(tiny_model("LlamaConfig"), exact_chunk=False)
    file = tmp_path / "prompt.tq.safetensors"
    save_cache(cache, file)
    for command in (["inspect", "--verify", str(file)], ["decompress", str(file), "-o", str(tmp_path / "x.npz")]):
        subprocess.run([sys.executable, "-m", "tqtool", *command], check=True, capture_output=True)
    keys = np.load(tmp_path / "x.npz")["layer1.keys"]
    np.testing.assert_array_equal(keys, cache.layers[1].sides[0].stored().restored())


def refusal(run: Any) -> TqError:
    with pytest.raises(TqError) as caught:
        run()
    return caught.value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_cache(filled(tiny_model("LlamaConfig")), tmp_path / "prompt.tq.safetensors")
    return tmp_path / "prompt.tq.safetensors"


def test_another_model_is_refused(saved: Path) -> None:
    other = tiny_model("Qwen3Config").config
    error = refusal(lambda: load_cache(saved, other))
    text = f"{saved}: the cache of a llama of 3 layers, the model is a qwen3 of 3"
    assert (str(error), error.code) == (text, "shape-mismatch")
    deeper = tiny_model("LlamaConfig", num_hidden_layers=4).config
    assert "of 3 layers, the model is a llama of 4" in str(refusal(lambda: load_cache(saved, deeper)))


def test_other_heads_are_refused_at_the_first_step(saved: Path) -> None:
    model = tiny_model("LlamaConfig", head_dim=32)
    error = refusal(lambda: going_on(model, load_cache(saved, model.config)))
    assert str(error) == "layer 0: 1 sequences of 2 heads of 16 in the cache, 1 of 2 of 32 come"


def test_damage_is_found(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-200] ^= 1
    saved.write_bytes(content)
    assert refusal(lambda: load_cache(saved, tiny_model("LlamaConfig").config)).code == "checksum"


def test_a_container_of_something_else_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3, 4, 16), np.float32))
    out = tmp_path / "x.tq.safetensors"
    command = ["compress", str(tmp_path / "x.npy"), "-o", str(out), "--bits", "4", "--layout", "bhtd"]
    done = subprocess.run([sys.executable, "-m", "tqtool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    error = refusal(lambda: load_cache(out, tiny_model("LlamaConfig").config))
    assert error.code == "not-container"
    assert error.hint == "save_cache writes one"


def test_an_empty_cache_is_not_saved(tmp_path: Path) -> None:
    config = tiny_model("LlamaConfig").config
    for cache in (turboquant_cache(config), DynamicCache(config=config)):
        with case(cache=type(cache).__name__):
            error = refusal(lambda cache=cache: save_cache(cache, tmp_path / "x.tq.safetensors"))
            assert "holds no codes" in str(error)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unless_told(saved: Path) -> None:
    before = saved.read_bytes()
    cache = filled(tiny_model("LlamaConfig"), meta="f32")
    assert refusal(lambda: save_cache(cache, saved)).code == "exists"
    assert saved.read_bytes() == before
    save_cache(cache, saved, force=True)
    assert saved.read_bytes() != before
