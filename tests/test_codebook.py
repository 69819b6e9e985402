"""Codebooks: published tables, quadrature by another method, and the laws that every optimum obeys."""

import math
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from scipy import integrate

from tqtool.codec import codebook
from tqtool.codec.codebook import RESIDUAL_LIMIT, lloyd_max, solve, table_error
from tqtool.codec.solved import DIMS, solved
from tqtool.codec.terms import LAWS, Law
from tqtool.errors import BugError, UsageError

SPECIFICATION = [(dim, bits) for dim in (64, 96, 128, 160) for bits in (2, 3, 4)]

# numerics.md, section 1: centroids of the positive half, dim 128
BETA = {
    2: "0.039836513029 0.132528415981",
    3: "0.021520867645 0.066328847022 0.117685941174 0.187679410967",
    4: "0.011258959137 0.034020079214 0.057550077585 0.082510357311 "
    "0.109865805717 0.141263776570 0.180149283869 0.236770279330",
}
SPHERE = {
    2: "0.039991595198 0.133041520250",
    3: "0.021604310642 0.066585608047 0.118139766997 0.188397185970",
    4: "0.011302496591 0.034151570704 0.057772298777 0.082828457307 "
    "0.110288369050 0.141805196783 0.180835963753 0.237663826765",
}
# Max 1960, table I, in standard deviations; digits beyond his four from case CB01
NORMAL = {
    1: "0.797884561",
    2: "0.452780035 1.510417608",
    3: "0.245094179 0.756005281 1.343909279 2.151945705",
    4: "0.128395030 0.388048299 0.656759119 0.942340456 1.256231197 1.618046386 2.069017227 2.732589571",
}
NORMAL_MSE = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}


def positive(book: codebook.Codebook) -> np.ndarray:
    return book.centroids[2 ** (book.bits - 1) :]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("law", "known"), [("beta", BETA), ("sphere", SPHERE)])
def test_centroids_at_dim_128_are_the_known_ones(law: Law, known: dict[int, str], bits: int) -> None:
    assert_allclose(positive(lloyd_max(128, bits, law)), np.fromstring(known[bits], sep=" "), atol=6e-13, rtol=0)


def test_mse_of_the_sphere_books_is_the_known_one() -> None:
    found = [128 * lloyd_max(128, bits, "sphere").mse for bits in (2, 3, 4)]
    assert_allclose(found, [0.116000070, 0.033965926, 0.009314788], atol=6e-10, rtol=0)


def test_reference_distortion_of_the_beta_books_is_the_known_one() -> None:
    assert_allclose([lloyd_max(128, b).distortion for b in (2, 3, 4)], [0.116006, 0.033968, 0.009316], atol=6e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [16, 128, 1024])
def test_gaussian_levels_agree_with_max(dim: int, bits: int) -> None:  # case CB01
    book = lloyd_max(dim, bits, "gaussian")
    assert_allclose(positive(book) * math.sqrt(dim), np.fromstring(NORMAL[bits], sep=" "), atol=1e-9, rtol=0)
    assert_allclose(dim * book.mse, NORMAL_MSE[bits], atol=6e-7, rtol=0)


def test_three_bits_do_not_reach_the_rounded_figure_of_the_paper() -> None:
    assert 128 * lloyd_max(128, 3, "sphere").mse > 0.03


@pytest.mark.parametrize("dim", [16, 64, 96, 160, 1024])
@pytest.mark.parametrize("bits", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("law", LAWS)
def test_every_level_is_the_mean_of_its_cell(law: Law, bits: int, dim: int) -> None:
    """Adaptive quadrature of the bare density, in standard deviations, normalised by itself."""
    book = lloyd_max(dim, bits, law)
    a = {"beta": dim / 2, "sphere": (dim - 1) / 2, "gaussian": math.inf}[law]
    sigma = 1 / math.sqrt(dim if law == "gaussian" else 2 * a + 1)
    half = 2 ** (bits - 1)
    end = 12.0 if law == "gaussian" else min(1 / sigma, 14.0)  # beyond these lies less than 1e-30
    edges = [0.0, *(book.boundaries[half:] / sigma), end]

    def density(z: float) -> float:
        return math.exp(-z * z / 2) if law == "gaussian" else (1 - (z * sigma) ** 2) ** (a - 1)

    def integral(power: int, lo: float, hi: float) -> float:
        value, _ = integrate.quad(lambda z: z**power * density(z), lo, hi, epsabs=0, epsrel=1e-13, limit=200)
        return value

    mass = np.array([integral(0, lo, hi) for lo, hi in pairwise(edges)])
    means = np.array([integral(1, lo, hi) for lo, hi in pairwise(edges)]) / mass
    assert_allclose(book.centroids[half:] / sigma, means, atol=2e-12, rtol=0)
    share = mass / mass.sum() / 2
    assert_allclose(book.entropy, -2 * np.sum(share * np.log2(share)), rtol=1e-11)
    assert_allclose(book.mse / sigma**2, 1 - 2 * np.sum(share * means**2), rtol=1e-10)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_books_keep_the_residual_rules_everywhere(bits: int, law: Law) -> None:
    for dim in (*range(16, 1025, 56), 972, 1023, 1024):  # 972 and 1024 are the hardest at 5 bits
        with case(dim=dim):
            book = lloyd_max(dim, bits, law)
            assert book.residual <= 1e-12
            assert book.newton_steps <= 7


@settings(deadline=None, max_examples=60)
@given(dim=st.integers(16, 1024), bits=st.integers(1, 8), law=st.sampled_from(LAWS))
def test_books_are_odd_ascending_and_nearest_neighbour(dim: int, bits: int, law: Law) -> None:
    book = lloyd_max(dim, bits, law)
    assert len(book.centroids) == 2**bits
    assert len(book.boundaries) == 2**bits - 1
    boundaries32, centroids32 = book.tables
    for table in (book.centroids, book.boundaries, centroids32, boundaries32):
        with case(table=table):
            assert_array_equal(table, -table[::-1])
            assert np.all(np.diff(table) > 0)
            assert not table.flags.writeable
    assert_allclose(book.boundaries, (book.centroids[1:] + book.centroids[:-1]) / 2, atol=1e-13)
    assert 0 < book.entropy <= bits
    assert book.mse < codebook.variance(dim, law) * 4.0 ** (1 - bits) * 1.1


@pytest.mark.parametrize("law", LAWS)
def test_no_other_table_has_a_smaller_error(law: Law) -> None:
    book = lloyd_max(96, 3, law)
    best = table_error(book.boundaries, book.centroids, 96, law)
    assert_allclose(best, 96 * book.mse, rtol=1e-12)
    rng = np.random.default_rng(5)
    for scale in (1e-4, 1e-2):
        with case(scale=scale):
            boundaries = book.boundaries + scale * rng.uniform(-1, 1, book.boundaries.shape)
            centroids = book.centroids + scale * rng.uniform(-1, 1, book.centroids.shape)
            assert table_error(boundaries, centroids, 96, law) > best


def test_expected_error_is_what_a_plain_sum_over_the_density_finds() -> None:
    """A lopsided table with a level outside [-1, 1], by the midpoint rule."""
    boundaries, centroids = [-0.3, 0.02, 0.21], [-1.4, -0.1, 0.07, 0.4]
    n, total, weight = 400_000, 0.0, 0.0
    t = (np.arange(n) + 0.5) / n * 2 - 1
    f = (1 - t * t) ** 6.5  # dim 16, sphere
    for value, level in zip([*boundaries, 1.0], centroids, strict=True):
        cell = (t < value) & (t >= ([-1.0, *boundaries][centroids.index(level)]))
        total += float(np.sum(f[cell] * (t[cell] - level) ** 2))
        weight += float(np.sum(f[cell]))
    assert_allclose(table_error(boundaries, centroids, 16), 16 * total / weight, rtol=1e-9)


def test_a_table_wider_than_the_interval_is_measured_without_warnings() -> None:
    book = lloyd_max(16, 8, "gaussian")  # its outer levels lie beyond 1
    assert book.centroids[-1] > 1
    assert 0 < book.distortion < 2e-4


def test_unit_tables_are_the_centred_ones_moved() -> None:
    for unit, centred in zip(lloyd_max(128, 4).unit_tables, lloyd_max(128, 4).tables, strict=True):
        with case(unit=unit, centred=centred):
            assert_allclose(2.0 * unit - 1, centred, atol=6e-8)
    assert lloyd_max(64, 2).unit_tables[0][1] == 0.5


@pytest.mark.parametrize(("bits", "ratio"), [(2, 1.11), (3, 1.45), (4, 2.06)])
def test_equal_mass_cells_would_cost_what_case_cb02_says(bits: int, ratio: float) -> None:
    """Levels that are means of cells of equal probability: 1.11, 1.45 and 2.06 times the optimum."""
    edges = np.array([-12.0, *(_normal_quantile(i / 2**bits) for i in range(1, 2**bits)), 12.0])
    pdf = np.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)
    levels = -np.diff(pdf) * 2**bits / math.sqrt(128)
    cost = table_error((levels[1:] + levels[:-1]) / 2, levels, 128) / lloyd_max(128, bits).distortion
    assert cost == pytest.approx(ratio, rel=0.02)  # CB02 measured a sample


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


@pytest.mark.parametrize(
    ("dim", "bits", "law", "message"),
    [
        (15, 4, "beta", "dim 15 is outside 16 to 1024"),
        (1025, 4, "beta", "dim 1025 is outside 16 to 1024"),
        (-128, 4, "beta", "dim -128 is outside 16 to 1024"),
        (128, 0, "beta", "0 bits is outside 1 to 8"),
        (128, 9, "beta", "9 bits is outside 1 to 8"),
        (128, 4, "uniform", "no law 'uniform'"),
    ],
)
def test_arguments_outside_the_range_are_refused(dim: int, bits: int, law: Law, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lloyd_max(dim, bits, law)


def test_a_book_that_did_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook, "NEWTON_ROUNDS", 2)
    with pytest.raises(BugError, match="dim 132, 6 bits, beta: residual"):
        lloyd_max(132, 6, "beta")


def test_twelve_tables_of_the_specification_take_under_50_ms() -> None:
    def seconds() -> float:  # of the processor: a busy machine is no reason to fail
        lloyd_max.cache_clear()
        begin = time.process_time()
        for dim, bits in SPECIFICATION:
            lloyd_max(dim, bits)
        return time.process_time() - begin

    assert min(seconds() for _ in range(4)) < 0.050


def test_scipy_waits_for_the_solver() -> None:
    code = "import sys, tqtool.codec.codebook; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dim", DIMS)
def test_a_stored_book_is_what_the_solver_gives(dim: int, law: Law, bits: int) -> None:
    stored, fresh = solved(dim, bits, law), solve(dim, bits, law)
    assert stored is not None
    ulps = 0 if bits <= 4 else 1  # another SciPy may round a level of a fine table the other way
    for ours, theirs in ((stored.means, fresh.means), (stored.edges, fresh.edges)):
        with case(ours=ours, theirs=theirs):
            assert_allclose(ours * np.sqrt(dim), theirs * np.sqrt(dim), rtol=0, atol=2e-12)
            apart = np.abs(ours.astype(np.float32).view(np.int32) - theirs.astype(np.float32).view(np.int32))
            assert apart.max(initial=0) <= ulps
    figures = ("mse", "entropy", "distortion")
    assert_allclose([getattr(stored, f) for f in figures], [getattr(fresh, f) for f in figures], rtol=1e-9)
    assert stored.lloyd_steps == fresh.lloyd_steps
    assert stored.residual <= RESIDUAL_LIMIT


def test_a_common_book_needs_no_scipy() -> None:
    code = (
        "import sys; from tqtool.codec.codebook import lloyd_max; lloyd_max(128, 4); print('scipy' in sys.modules);"
        "lloyd_max(104, 4); print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
