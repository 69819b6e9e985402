"""Stored bytes: the specification's tables, reproduced exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from tqtool.codec.sizes import AttentionLayer, KVConfig, cache_size, vector_bytes
from tqtool.errors import UsageError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("config", "meta", "pair", "ratio"),
    [
        ("K4/V2", "range", 112, 9.14),
        ("K3/V2", "range", 96, 10.67),
        ("K4/V4", "range", 144, 7.11),
        ("K4/V2", "f32", 104, 9.85),
        ("K3/V2", "f32", 88, 11.64),
        ("K4/V4", "f32", 136, 7.53),
        ("K4/V2", "bf16", 100, 10.24),
        ("K3/V2", "bf16", 84, 12.19),
        ("K4/V4", "bf16", 132, 7.76),
    ],
)
def test_pairs_of_128_cost_what_the_design_says(config: str, meta: Any, pair: int, ratio: float) -> None:
    assert KVConfig() == KVConfig.parse("K4/V2")
    parsed = KVConfig.parse(config)
    assert parsed.pair_bytes(128, meta) == pair
    assert cache_size(parsed, [AttentionLayer(1, 128)], tokens=1, meta=meta).ratio == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(
    ("heads", "config", "expected"), [(16, "K4/V2", 1792), (32, "K4/V2", 3584), (16, "K3/V2", 1536)]
)
def test_a_token_of_a_layer_costs_what_the_specification_says(heads: int, config: str, expected: int) -> None:
    assert cache_size(KVConfig.parse(config), [AttentionLayer(heads, 128)], tokens=1).total == expected


def test_whole_caches_cost_what_the_specification_says() -> None:
    rwkv = [AttentionLayer(16, 128)]
    llama = [AttentionLayer(32, 128)]
    k4v2 = KVConfig(4, 2)
    assert cache_size(k4v2, rwkv, tokens=2048).total == 3.5 * MIB
    assert cache_size(k4v2, rwkv * 4, tokens=2048).total == 14 * MIB
    assert cache_size(k4v2, rwkv * 4, tokens=2048).float32 == 128 * MIB
    assert cache_size(k4v2, llama, tokens=4096).total == 14 * MIB
    assert cache_size(k4v2, llama * 24, tokens=4096).total == 336 * MIB
    assert cache_size(k4v2, llama * 24, tokens=4096).float32 == 3072 * MIB


@pytest.mark.parametrize(
    ("dim", "bits", "meta", "expected"),
    [(128, 2, "bf16", 34), (128, 3, "bf16", 50), (128, 4, "bf16", 66), (64, 2, "bf16", 18), (64, 3, "bf16", 26),
     (64, 4, "bf16", 34), (128, 2, "f32", 36), (128, 3, "f32", 52), (128, 4, "f32", 68), (100, 3, "f32", 42)],
)  # fmt: skip
def test_vectors_cost_codes_and_metadata(dim: int, bits: int, meta: Any, expected: int) -> None:
    assert vector_bytes(dim, bits, meta) == expected


def test_untouched_sides_are_float16_without_metadata() -> None:
    assert vector_bytes(128, 16) == 256
    assert KVConfig.parse("k16v16") == KVConfig(16, 16)
    assert cache_size(KVConfig(16, 16), [AttentionLayer(1, 128)], tokens=3).ratio == 2


@pytest.mark.parametrize("text", ["k4v2", "K4V2", "K4/V2", " k4/v2 "])
def test_configurations_are_read_in_every_accepted_form(text: str) -> None:
    assert KVConfig.parse(text) == KVConfig(4, 2)
    assert str(KVConfig.parse(text)) == "K4/V2"


@pytest.mark.parametrize("text", ["", "4/2", "k4", "k4v", "v2k4", "k4-v2", "K4/V2/V3", "k٤v2"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form K4/V2"):
        KVConfig.parse(text)


@pytest.mark.parametrize("text", ["k0v2", "k4v9", "k15v4", "k17v4"])
def test_other_widths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="1 to 8 bits, or 16"):
        KVConfig.parse(text)


def test_lists_keep_their_order_and_drop_repeats() -> None:
    assert [str(c) for c in KVConfig.parse_list("k4v2,K2/V2, k4v2,")] == ["K4/V2", "K2/V2"]


LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def test_size_prints_the_specifications_tables(tqtool: Run) -> None:
    llama = tqtool("size", "--layers", 24, "--kv-heads", 32, "--head-dim", 128, "--tokens", 4096, "-c", "k4v2")
    assert llama.returncode == 0
    assert {"336 MiB", "3 GiB", "9.14x"} <= set(re.split(r"\s{2,}", llama.stdout))
    rwkv = json.loads(tqtool("size", "--layers", 4, "--kv-heads", 16, "--tokens", 2048, "-c", "K4/V2", "--json").stdout)
    assert rwkv["rows"][0]["total_bytes"] == 14 * MIB


def test_size_counts_one_as_one_and_answers_at_its_limits(tqtool: Run) -> None:
    assert tqtool("size").stdout.startswith("1 layer x 1 KV head x 128 x 1 token, metadata range\n")
    most = ("--layers", 1 << 14, "--kv-heads", 1 << 20, "--head-dim", 1 << 20, "--tokens", 1 << 40)
    (row,) = json.loads(tqtool("size", *most, "-c", "K4/V4", "--json").stdout)["rows"]
    assert row["payload_bytes"] == 1 << (14 + 20 + 20 + 40)
    assert tqtool("size", *most).returncode == 0


def test_size_reads_a_model_configuration(tqtool: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "sliding_window": 512, "sliding_window_pattern": 4}))
    answer = json.loads(tqtool("size", "--model", "config.json", "--tokens", 1000, "-c", "k4v2", "--json").stdout)
    assert answer["rows"][0]["total_bytes"] == 112 * 8 * (3 * 512 + 1000)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["-c", "k4"], 2, "error[usage]: configuration 'k4' is not of the form K4/V2"),
        (["-c", ","], 2, "error[usage]: --config names no configuration"),
        (["--tokens", "9" * 20], 2, "error[usage]: Invalid value for '--tokens'"),
        (["--layers", "9999999999"], 2, "error[usage]: Invalid value for '--layers'"),
        (["--model", "config.json", "--layers", "3"], 2, "error[usage]: --layers and --model contradict each other"),
        (["--model", "config.json", "--head-dim", "64"], 2, "error[usage]: --head-dim and --model contradict"),
        (["--tokens", "many"], 2, "error[usage]: Invalid value for '--tokens'"),
        (["--model", "absent.json"], 3, "error[not-found]: absent.json: no such file"),
        (["--model", "."], 3, "error[is-directory]: .: is a directory"),
    ],
)
def test_size_refuses_in_one_line(tqtool: Run, arguments: list[str], status: int, line: str) -> None:
    result = tqtool("size", *arguments)
    assert result.returncode == status
    assert line in result.stderr.splitlines()[0]
    assert result.stdout == ""
