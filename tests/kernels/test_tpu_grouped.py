"""Grouped products on the TPU kernels, interpreted, against the sums written out in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.experts import grouped_dot
from pallas_kernels.tpu import grouped
from tests.kernels.oracle import error
from tests.kernels.run_tpu import interpreted

# Rows, widths and groups: widths in one block and in several, that fill their blocks or not; more groups than rows.
SHAPES = [(100, 48, 40, 5), (48, 136, 200, 3), (7, 16, 16, 9), (96, 256, 128, 4)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many steps from few rows, and the tiles of the two kernels unlike each other."""
    for name, value in dict(ROWS=16, OUTER_ROWS=24, WIDTH=128, OUTER_BLOCK=(128, 128), DEPTH={2: 128, 4: 128}).items():
        monkeypatch.setattr(grouped, name, value)


def sizes_of(M: int, E: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(M)
    draws = {f"draw {n}": rng.multinomial(m, rng.dirichlet([0.4] * E)) for n, m in enumerate((M, M // 2))}
    group = np.arange(E)
    tiles = np.where(group < M // 48, 48, 0)  # groups that end where tiles of both kernels do
    return draws | {"none": 0 * group, "one": np.where(group == E // 2, M, 0), "first": np.where(group == 0, M, 0), "tiles": tiles}


def written_out(x, w, dy, sizes) -> list[np.ndarray]:
    ends = np.cumsum(sizes)
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return [y, dx, dw]


@functools.cache
def run(M, D, F, E):
    """The products and both gradients as one program, for one shape."""

    def all_three(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, "pallas_tpu"), x, w)
        return y, *pull(dy)

    return jax.jit(all_three)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_gradients(shape):
    """Rows after the last group hold NaN: they give zeros and reach nothing. A group without rows has gradients of exactly zero."""
    M, D, F, E = shape
    rng = np.random.default_rng(0)
    w = rng.normal(size=(E, D, F)).astype(np.float32)
    for name, sizes in sizes_of(M, E).items():
        x, dy = (rng.normal(size=(M, n)).astype(np.float32) for n in (D, F))
        x[sizes.sum() :] = dy[sizes.sum() :] = np.nan
        with interpreted():
            got = run(*shape)(*map(jnp.asarray, (x, w, dy, sizes)))
        for a, want in zip(got, written_out(*(a.astype(np.float64) for a in (x, w, dy)), sizes), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[want == 0], 0, err_msg=name)
            assert not want.any() or error(a, want) <= 1e-6, name


def test_sums_of_bfloat16_are_rounded_once():
    M, D, F, E = 96, 256, 136, 3
    rng = np.random.default_rng(1)
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, D), (E, D, F), (M, F)))
    sizes = np.array([40, 3, 50])
    with interpreted():
        got = run(M, D, F, E)(x, w, dy, jnp.asarray(sizes))
    for a, want in zip(got, written_out(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes), strict=True):
        rounded = np.asarray(jnp.asarray(want, jnp.bfloat16), np.float64)
        assert a.dtype == jnp.bfloat16
        assert error(a, want) <= 1.01 * error(rounded, want)


def test_types_that_the_kernels_do_not_take():
    x, w, sizes = jnp.ones((4, 8), jnp.float16), jnp.ones((2, 8, 3), jnp.bfloat16), jnp.array([1, 3])
    with interpreted():
        y = jax.jit(lambda *a: grouped_dot(*a, "pallas_tpu"))(x, w, sizes)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, 8)
    with pytest.raises(NotImplementedError, match="nothing to compute"):
        grouped_dot(x[:0], w, sizes, "pallas_tpu")
    with pytest.raises(NotImplementedError, match="'pallas_tpu' does not apply: this process computes on cpu"):
        grouped_dot(x, w, sizes, "pallas_tpu")


def test_no_step_meets_twice():
    """Every row of a group is met once; steps are at most tiles + groups - 1 and never go back."""
    for M, E in ((100, 5), (7, 9), (96, 4)):
        for sizes in sizes_of(M, E).values():
            for rows, least in ((16, 0), (24, 1)):
                meet = jax.tree.map(np.asarray, grouped.meetings(jnp.asarray(sizes), M, rows, least))
                assert (np.diff(meet.tile) >= 0).all()
                assert (np.diff(meet.group) >= 0).all()
                pairs = set(zip(meet.tile.tolist(), meet.group.tolist(), strict=True))
                met = np.zeros(M, int)
                for tile, e in pairs:
                    met[max(tile * rows, meet.bounds[e]) : min((tile + 1) * rows, meet.bounds[e + 1])] += 1
                np.testing.assert_array_equal(met, np.arange(M) < sizes.sum())
                assert set(meet.tile) == set(range(-(-M // rows))) or least == 1
                assert least == 0 or set(meet.group) == set(range(E))
