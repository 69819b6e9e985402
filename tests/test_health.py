"""What health says of data whose peculiarity is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tqtool.dumps.datafiles import open_arrays
from tqtool.dumps.layouts import vectors_last
from tqtool.health import examine, looks_transposed, sample, scan

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def iid() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((4, 300, 128)).astype(np.float32)


def test_independent_noise_is_named(iid: NDArray[np.float32]) -> None:
    found = examine(iid)
    assert found.looks_iid
    assert found.kurtosis == pytest.approx(3 * 128 / 130, abs=0.05)  # of a normal vector scaled to length 1
    assert found.rotated_kurtosis == pytest.approx(found.kurtosis, abs=0.05)
    assert (found.zero_vectors, found.outlier_channels) == (0, ())
    assert found.offset_share < 0.01


@pytest.mark.parametrize("change", ["offset", "channel", "norms", "trend"])
def test_data_with_any_structure_are_not_called_noise(iid: NDArray[np.float32], change: str) -> None:
    if change == "offset":
        iid += 0.5
    elif change == "channel":
        iid[..., 7] *= 4
    elif change == "norms":
        iid *= np.linspace(0.5, 2, 300, dtype=np.float32)[:, None]
    else:
        iid[:, 1:] += 0.3 * iid[:, :-1]
    assert not examine(iid).looks_iid


def test_offset_outliers_zeros_and_norms(iid: NDArray[np.float32]) -> None:
    iid[..., [3, 67]] *= 20
    found = examine(iid)
    assert found.outlier_channels == (3, 67)
    assert found.kurtosis > 20
    assert found.rotated_kurtosis < 3.5
    iid += 30
    iid[1, 5:8] = 0
    iid[2, 0] *= 300
    found = examine(iid)
    assert found.zero_vectors == 3
    assert 0.4 < found.offset_share < 0.9
    assert found.norm_max > 65504
    assert set(found.findings()) >= {"zero", "norm"}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scan_finds_the_first_of_each_fault_whatever_the_order(
    tmp_path: Path, iid: NDArray[np.float32], order: str, axis: int
) -> None:
    iid[3, 7, 5] = iid[1, 299, 127] = np.nan
    iid[2, 0, 0], iid[2, 0, 1] = np.inf, -np.inf
    iid[0, 250] = 0
    iid[3, 3] *= 1e36
    np.save(tmp_path / "x.npy", np.asarray(np.moveaxis(iid, -1, axis), order=order))  # type: ignore[call-overload]
    found = scan(vectors_last(open_arrays(tmp_path / "x.npy")[0], axis=axis))
    assert (found.nan, found.inf, found.zero_vectors) == (2, 2, 1)
    assert (found.first_nan, found.first_inf) == ((1, 299, 127), (2, 0, 0))
    assert found.first_too_long == (3, 3)


@pytest.mark.parametrize("factor", [1e60, 1e200, 1e-30])
def test_float64_is_measured_as_it_is(tmp_path: Path, iid: NDArray[np.float32], factor: float) -> None:
    np.save(tmp_path / "x.npy", iid)
    np.save(tmp_path / "y.npy", iid.astype(np.float64) * factor)
    plain, scaled = (scan(open_arrays(tmp_path / name)[0]) for name in ("x.npy", "y.npy"))
    assert scaled.zero_vectors == 0
    assert scaled.norm_min == pytest.approx(plain.norm_min * factor)
    assert scaled.norm_max == pytest.approx(plain.norm_max * factor)
    assert scaled.kurtosis == pytest.approx(plain.kurtosis, rel=1e-5)
    assert scaled.offset_share == pytest.approx(plain.offset_share)
    assert scaled.looks_iid
    found = examine(sample(open_arrays(tmp_path / "y.npy")[0])).findings()
    assert "zero" not in found
    assert ("norm" in found) == (factor > 1)


def test_a_sample_takes_whole_heads_and_all_of_little(tmp_path: Path) -> None:
    x = np.arange(20 * 3000 * 16, dtype=np.float32).reshape(20, 3000, 16)
    np.save(tmp_path / "x.npy", x)
    taken = sample(open_arrays(tmp_path / "x.npy")[0])
    assert taken.shape == (8, 512, 16)
    assert (taken[0, 0] == x[0, 0]).all()
    assert (taken[-1, -1] == x[-1, -1]).all()
    np.save(tmp_path / "x.npy", x[:3, :40].transpose(1, 0, 2))
    assert sample(open_arrays(tmp_path / "x.npy")[0]).shape == (3, 40, 16)


def test_a_last_axis_that_looks_like_tokens() -> None:
    assert looks_transposed((8, 128, 512)) is not None
    assert looks_transposed((8, 512, 128)) is None
    assert looks_transposed((8, 128, 128)) is None
    assert looks_transposed((4096, 576)) is None


@pytest.mark.skipif(not (SHARED / "dumps").is_dir(), reason="../shared/dumps is absent")
def test_captured_keys() -> None:
    """dumps/README.md: 58 % of the energy is one vector, kurtosis 6-19 before and 2.4-3.0 after rotation."""
    found = [scan(open_arrays(path)[0]) for path in sorted((SHARED / "dumps/smollm2-135m/kv").glob("*_k.npy"))]
    assert np.median([each.offset_share for each in found]) == pytest.approx(0.6, abs=0.06)
    assert all(5 < each.kurtosis < 19 and 2.4 < each.rotated_kurtosis < 3 for each in found)
    assert not any(each.looks_iid for each in found)
    assert all(each.outlier_channels for each in found)
