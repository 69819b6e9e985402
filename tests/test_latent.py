"""Latent attention (MLA): measured as the heads read it, held against every head expanded in plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tqtool.codec.codec import decode, encode
from tqtool.codec.spec import CodecSpec
from tqtool.dumps.dump import load_dump
from tqtool.errors import InputError, UsageError
from tqtool.report.model import Report
from tqtool.report.params import Params
from tqtool.validation.dump_data import from_dump
from tqtool.validation.run import validate

Array = NDArray[np.float64]
HEADS, TOKENS, QUERIES, RANK, ROPE, NOPE, VALUE = 3, 40, 12, 48, 16, 24, 20
SCALE = 0.17


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    arrays = {
        "latent": rng.standard_normal((1, TOKENS, RANK)) * rng.gamma(1, 1, (1, TOKENS, 1)),
        "rope": rng.standard_normal((1, TOKENS, ROPE)) + 1,
        "kv_b": rng.standard_normal((HEADS, NOPE + VALUE, RANK)) / 5,
        "q": rng.standard_normal((HEADS, QUERIES, NOPE + ROPE)),
    }
    for part, x in arrays.items():
        np.save(tmp_path / f"layer00_{part}.npy", x.astype(np.float32))
    write(tmp_path)
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    files = {"latent": "layer00_latent.npy", "rope_key": "layer00_rope.npy", "kv_b": "layer00_kv_b.npy"}
    layer = {"layer": 0, "kind": "latent", "heads": HEADS, "kv_heads": 1, "key_dim": NOPE + ROPE, "value_dim": VALUE}
    layer |= {"scaling": SCALE, "files": files | {"q": "layer00_q.npy"}} | changes
    manifest = {"schema": "tqtool.dump/1", "tokens": TOKENS, "query_tail": QUERIES, "layers": [layer]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def measured(folder: Path, *configs: str, **params: Any) -> Report:
    return validate([from_dump(load_dump(folder))], Params(configs=configs, **params))


def attend(q: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Weights and outputs of one head, one query after the other: a loop that knows nothing of the product's."""
    weights, outputs = np.zeros((QUERIES, TOKENS)), np.zeros((QUERIES, VALUE))
    for i in range(QUERIES):
        last = TOKENS - QUERIES + i + 1
        scores = SCALE * keys[:last] @ q[i]
        weights[i, :last] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        outputs[i] = weights[i] @ values
    return weights, outputs


def expected(folder: Path, bits: int) -> dict[str, float]:
    latent, rope, kv_b, q = (
        np.load(folder / f"layer00_{part}.npy").astype(np.float64) for part in ("latent", "rope", "kv_b", "q")
    )
    stored = np.concatenate([latent[0], rope[0]], axis=1)
    restored = decode(encode(stored.astype(np.float32), CodecSpec(RANK + ROPE, bits))).astype(np.float64)
    found: dict[str, list[Array]] = {"kl": [], "v_readout_err": [], "rel_err": [], "n_eff": []}
    for head in range(HEADS):
        sides = []
        for x in (stored, restored):
            expanded = x[:, :RANK] @ kv_b[head].T
            sides.append((np.concatenate([expanded[:, :NOPE], x[:, RANK:]], axis=1), expanded[:, NOPE:]))
        (k, v), (other_k, other_v) = sides
        p, output = attend(q[head], k, v)
        other_p, other = attend(q[head], other_k, other_v)
        seen = p > 0
        ratio = np.log(np.where(seen, p, 1) / np.where(seen, other_p, 1))
        norm = np.linalg.norm(output, axis=1)
        found["kl"].append((p * ratio).sum(1))
        found["n_eff"].append(np.exp(-(p * np.log(np.where(seen, p, 1))).sum(1)))
        found["v_readout_err"].append(np.linalg.norm(p @ other_v - output, axis=1) / norm)
        found["rel_err"].append(np.linalg.norm(other - output, axis=1) / norm)
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize("bits", [2, 4])
def test_heads_are_measured_as_if_expanded(bits: int, dump: Path) -> None:
    (row,) = [row for row in measured(dump, f"K{bits}/V{bits}").rows if row.kind == "turboquant"]
    wanted = expected(dump, bits)
    assert {name: row.metrics[name].mean for name in wanted} == pytest.approx(wanted, rel=2e-5)


def test_the_bits_of_values_do_nothing_and_a_warning_says_so(dump: Path) -> None:
    report = measured(dump, "K4/V4", "K4/V2")
    full, half = (row for row in report.rows if row.kind == "turboquant")
    means = [{name: summary.mean for name, summary in row.metrics.items()} for row in (full, half)]
    assert means[0] == pytest.approx(means[1], rel=0, abs=0, nan_ok=True)
    assert full.pair_bytes == half.pair_bytes == 8 + (RANK + ROPE) * 4 / 8  # one vector a token, its metadata with it
    assert full.bits_per_value == full.value_bits_per_value == 8 * full.pair_bytes / (RANK + ROPE)
    assert [notice.code for notice in report.warnings if notice.code == "latent"] == ["latent"]


def test_values_alone_quantize_nothing(dump: Path) -> None:
    (row,) = [row for row in measured(dump, "K16/V4").rows if row.config == "K16/V4"]
    assert row.status == "error"


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_error_of_the_stored_vector_is_what_theory_expects(side: str, dump: Path) -> None:
    (row,) = [row for row in measured(dump, "K3/V3", seeds=tuple(range(8))).rows if row.config == "K3/V3"]
    assert row.metrics[f"{side}_distortion_ratio"].mean == pytest.approx(1, abs=0.1)


def test_a_residual_window_over_everything_is_exact(dump: Path) -> None:
    (row,) = [row for row in measured(dump, "K2/V2", residual_window=TOKENS).rows if row.config == "K2/V2"]
    assert row.metrics["kl"].mean == pytest.approx(0, abs=1e-12)
    assert row.metrics["rel_err"].mean == pytest.approx(0, abs=1e-7)


def test_recommend_has_nothing_to_part(dump: Path) -> None:
    with pytest.raises(UsageError, match="layer 0 stores a latent, whose bits for keys and values cannot be parted"):
        measured(dump, "K4/V4", recommend_widths=(2, 4))


def test_the_command_line_measures_it(dump: Path, tqtool: Callable[..., Any]) -> None:
    done = tqtool("validate", dump, "-c", "K4/V4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sources"][0]["layer_facts"][0]["latent"] is True
    assert "ignored" not in done.stderr


def test_compress_says_that_the_folder_holds_no_keys_and_values(dump: Path, tqtool: Callable[..., Any]) -> None:
    done = tqtool("compress", dump)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"tqtool: error[no-tensors]: {dump}: no keys and values in this folder, only queries",
        "  hint: name the files themselves, for instance those of a latent",
    ]
    assert tqtool("compress", dump / "layer00_latent.npy").returncode == 0


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"value_dim": 21}, "manifest", "the manifest says value_dim 21, the arrays have 20"),
        ({"heads": 4}, "layout", "the manifest says 4 heads"),
        ({"kv_heads": 2}, "manifest", "the manifest says kv_heads 2, the arrays have 1"),
        ({"files": {"latent": "layer00_latent.npy"}}, "manifest", "files.rope_key is None"),
        (
            {"files": {"latent": "../layer00_latent.npy", "rope_key": "r", "kv_b": "b"}},
            "manifest",
            "files.latent is '../layer00_latent.npy', not the name of a file beside the manifest",
        ),
        (
            {"files": {"latent": "layer00_rope.npy", "rope_key": "layer00_rope.npy", "kv_b": "layer00_kv_b.npy"}},
            "shape-mismatch",
            "do not fit each other",
        ),
        (
            {"files": {"latent": "gone.npy", "rope_key": "layer00_rope.npy", "kv_b": "layer00_kv_b.npy"}},
            "not-found",
            "gone.npy: no such file",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], code: str, message: str, dump: Path) -> None:
    write(dump, **changes)
    with pytest.raises(InputError) as caught:
        load_dump(dump)
    assert caught.value.code == code
    assert message in str(caught.value)


def test_latents_without_queries_are_refused(dump: Path) -> None:
    (dump / "layer00_q.npy").unlink()
    for part in ("k", "v"):
        np.save(dump / f"layer00_{part}.npy", np.ones((1, TOKENS, 16), np.float32))
    with pytest.raises(InputError, match="layer 0 is latent and has no queries"):
        load_dump(dump)
