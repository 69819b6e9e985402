"""The recipes of docs/model.md, run word by word on arrays of the layouts that they are for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loops import case
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from tqtool.dtypes import AnyArray
from tqtool.dumps.dump import Dump, load_dump

RECIPES = dict(
    re.findall(
        r"```python\n# recipe: (\S+)\n(.*?)```",
        (Path(__file__).parents[1] / "docs" / "model.md").read_text(),
        re.DOTALL,
    )
)
LAYERS, HEADS, TOKENS, DIM = 2, 3, 37, 64


def cook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    monkeypatch.chdir(folder)
    exec(compile(RECIPES[name], f"recipe {name}", "exec"), names)


@pytest.fixture
def kv() -> AnyArray:
    """(layers, k and v, heads, tokens, dim)."""
    return np.random.default_rng(7).standard_normal((LAYERS, 2, HEADS, TOKENS, DIM)).astype(np.float16)


def holds(dump: Dump, kv: AnyArray) -> None:
    assert [layer.number for layer in dump.layers] == list(range(LAYERS))
    for layer, expected in zip(dump.layers, kv, strict=True):
        with case(layer=layer.number):
            _, k, v = layer.arrays()
            assert_array_equal(k, expected[0].astype(np.float32))
            assert_array_equal(v, expected[1].astype(np.float32))


def paged(x: AnyArray, rng: np.random.Generator, block: int, table: AnyArray) -> AnyArray:
    """Scatter (heads, tokens, dim) into blocks: (blocks, block_size, heads, dim), with noise where nothing lies."""
    blocks = rng.standard_normal((table.max() + 3, block, HEADS, DIM)).astype(x.dtype)
    for token in range(TOKENS):
        blocks[table[token // block], token % block] = x[:, token]
    return blocks


class Tensor:
    """As much of a torch tensor as the recipe uses."""

    def __init__(self, values: AnyArray) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.values[index])

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.values))

    def cpu(self) -> Tensor:
        return self


def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipes import safetensors.torch where there is no torch."""
    module = ModuleType("safetensors.torch")

    def save(tensors: dict[str, Tensor], path: str) -> None:
        save_file({name: tensor.values for name, tensor in tensors.items()}, path)

    module.save_file = save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: AnyArray) -> None:
    fake_torch(monkeypatch)
    bf16 = kv.astype(ml_dtypes.bfloat16)
    layers = [SimpleNamespace(keys=Tensor(k[None]), values=Tensor(v[None])) for k, v in bf16]
    layers.append(SimpleNamespace(keys=None, values=None))  # a layer of another kind
    cook("transformers", tmp_path, monkeypatch, cache=SimpleNamespace(layers=layers))
    holds(load_dump(tmp_path / "cache.safetensors", layout="bhtd"), bf16)


def test_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: AnyArray) -> None:
    rng = np.random.default_rng(1)
    table = np.array([[1, 2, 3], [7, 0, 4]])
    caches = [np.stack([paged(side, rng, 16, table[1]) for side in layer]) for layer in kv]
    cook("vllm", tmp_path, monkeypatch, kv_caches=caches, block_table=table, sequence=1, tokens=TOKENS)
    holds(load_dump(tmp_path, layout="thd"), kv)


def test_vllm_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: AnyArray) -> None:
    rng = np.random.default_rng(2)
    table = np.array([[5, 1, 2, 8, 3]])
    caches = []
    for layer in kv:
        k, v = (paged(side, rng, 8, table[0]) for side in layer)  # blocks, block_size, heads, dim
        k = k.reshape(*k.shape[:3], DIM // 8, 8).transpose(0, 2, 3, 1, 4)
        caches.append((k, v.transpose(0, 2, 3, 1)))
    cook("vllm-paged", tmp_path, monkeypatch, kv_caches=caches, block_table=table, sequence=0, tokens=TOKENS)
    holds(load_dump(tmp_path, layout="thd"), kv)


@pytest.mark.parametrize("flash_attention", [True, False])
def test_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: AnyArray, flash_attention: bool) -> None:
    cells = 64
    for i, layer in enumerate(kv):
        k, v = np.zeros((2, cells, HEADS, DIM), np.float16)
        k[:TOKENS], v[:TOKENS] = layer.transpose(0, 2, 1, 3)
        k.tofile(tmp_path / f"cache_k_l{i}.bin")
        (v if flash_attention else v.transpose(1, 2, 0).copy()).tofile(tmp_path / f"cache_v_l{i}.bin")
    sizes = {"layers": LAYERS, "kv_size": cells, "kv_heads": HEADS, "head_dim": DIM, "tokens": TOKENS}
    cook("llama.cpp", tmp_path, monkeypatch, flash_attention=flash_attention, **sizes)
    holds(load_dump(tmp_path, layout="thd"), kv)


def test_every_recipe_is_run() -> None:
    tested = Path(__file__).read_text()
    assert RECIPES
    assert all(f'cook("{name}"' in tested for name in RECIPES)
