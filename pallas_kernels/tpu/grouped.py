"""Consecutive rows of a matrix, each group with a matrix of its own: the products of a mixture of experts and of its gradients.

    grouped_dot      y[r]  = x[r] w[group of r]                  rows times their group's matrix
    grouped_outer    dw[e] = sum over r in e of x[r]^T dy[r]     the gradient of w, which `jax.lax.ragged_dot` makes E times the work

A grid step is the meeting of a tile of rows with a group: a tile that holds rows of several groups is met by each. Steps are planned on
the device before the kernel runs; there are never more than tiles + groups - 1, and those that are not needed neither move nor multiply.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.plan import LANES

ROWS = 256  # of a tile of grouped_dot: a group that begins inside one multiplies up to so many rows more
WIDTH = 1024  # columns of its block of y
DEPTH = {2: 8192, 4: 2048}  # of a sum made at once, by bytes of an operand: split, every tile of rows would read its matrix anew
OUTER_ROWS = 512  # of a tile of grouped_outer, each of which is added to a whole block of dw
OUTER_BLOCK = (1024, 1536)
VMEM_BYTES = 60 * 2**20


class Meetings(NamedTuple):
    """What each of the S = tiles + E - 1 grid steps is."""

    tile: jax.Array
    """[S], never falling. Tiles after the last group are visited too."""
    group: jax.Array
    """[S], never falling."""
    bounds: jax.Array
    """[E + 1]: group e has rows bounds[e] .. bounds[e + 1] - 1."""


def meetings(group_sizes: jax.Array, M: int, rows: int, least: int) -> Meetings:
    """The steps for M rows in tiles of `rows`; a group without rows gets `least` steps, 0 or 1."""
    E, tiles = group_sizes.shape[0], -(-M // rows)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes.astype(jnp.int32)
    first = jnp.minimum(starts // rows, tiles - 1)
    before = jnp.cumsum(jnp.where(ends > starts, (ends - 1) // rows - first + 1, least))
    used, step = before[-1], jnp.arange(tiles + E - 1, dtype=jnp.int32)
    group = jnp.searchsorted(before, jnp.minimum(step, used - 1), side="right").astype(jnp.int32)
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), before])[group]
    tile = jnp.where(step < used, first[group] + step - begin, (ends[-1] - 1) // rows + 1 + step - used)
    return Meetings(jnp.minimum(tile, tiles - 1), group, jnp.concatenate([starts[:1], ends]))


def grouped_dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Each group of consecutive rows times its own matrix; rows after the last group give zero. Only matrices of groups with rows are read.

    Args:
      x: [M, D]; w: [E, D, F], or [E, F, D] if `transposed`; bfloat16 both, or float32 both (six MXU passes). M, E, D and F at least 1.
      group_sizes: [E] integers, in all at most M.

    Returns:
      [M, F] in x's dtype, rounded once from float32 sums.
    """
    (M, D), F = x.shape, w.shape[1 if transposed else 2]
    width, depth = _block(F, WIDTH, cores=2), _block(D, DEPTH[x.dtype.itemsize])
    matrix = (None, width, depth) if transposed else (None, depth, width)
    return _call(
        functools.partial(_dot_kernel, D, transposed),
        meetings(group_sizes, M, ROWS, least=0),
        grid=lambda steps: (-(-F // width), steps, -(-D // depth)),
        inputs=[
            (x, (ROWS, depth), lambda f, s, d, meet: (_filled(meet, s, ROWS), d)),
            (w, matrix, lambda f, s, d, meet: (meet.group[s], *((f, d) if transposed else (d, f)))),
        ],
        output=(jax.ShapeDtypeStruct((M, F), x.dtype), (ROWS, width), lambda f, s, d, meet: (meet.tile[s], f)),
        name="grouped_dot",
    )


def grouped_outer(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Each group's own sum of products of its rows, dw[e] = x[rows of e]^T dy[rows of e]: zero for a group without rows.

    Args:
      x: [M, D]; dy: [M, F]; bfloat16 both, or float32 both (six MXU passes). Rows after the last group take no part, whatever they hold.
        M, D and F at least 1.
      group_sizes: [E] integers, in all at most M; E at least 1.

    Returns:
      [E, D, F] in x's dtype, rounded once from float32 sums.
    """
    (M, D), F, E = x.shape, dy.shape[1], group_sizes.shape[0]
    height, width = _block(D, OUTER_BLOCK[0], cores=2), _block(F, OUTER_BLOCK[1])
    return _call(
        _outer_kernel,
        meetings(group_sizes, M, OUTER_ROWS, least=1),
        grid=lambda steps: (-(-D // height), -(-F // width), steps),
        inputs=[
            (x, (OUTER_ROWS, height), lambda d, f, s, meet: (_filled(meet, s, OUTER_ROWS), d)),
            (dy, (OUTER_ROWS, width), lambda d, f, s, meet: (_filled(meet, s, OUTER_ROWS), f)),
        ],
        output=(jax.ShapeDtypeStruct((E, D, F), x.dtype), (None, height, width), lambda d, f, s, meet: (meet.group[s], d, f)),
        name="grouped_outer",
    )


def _call(kernel, meet: Meetings, grid, inputs, output, name: str) -> jax.Array:
    """The kernel over blocks (array, shape, index by grid position and meetings), with a float32 sum as large as the output's."""
    spec = lambda shape, index: pl.BlockSpec(shape, lambda i, j, k, *prefetched: index(i, j, k, Meetings(*prefetched)))
    out, block, index = output
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(meet),
            grid=grid(len(meet.tile)),
            in_specs=[spec(shape, index) for _, shape, index in inputs],
            out_specs=spec(block, index),
            scratch_shapes=[pltpu.VMEM(block[-2:], jnp.float32)],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        name=name,
    )(*meet, *(x for x, *_ in inputs))


def _dot_kernel(D: int, transposed: bool, tile, group, bounds, x, w, y, total):
    s, d, deep = pl.program_id(1), pl.program_id(2), x.shape[1]

    @pl.when(d == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(_meet(s, tile, group, bounds, ROWS))
    def _():
        left, right = x[...], w[...]
        if D % deep:  # the last block of the sum reaches beyond its matrices
            left = jnp.where(_iota(left, 1) < D - d * deep, left, 0)
            right = jnp.where(_iota(right, int(transposed)) < D - d * deep, right, 0)
        total[...] += _product(left, right, ((1,), (int(transposed),)))

    @pl.when((d == pl.num_programs(2) - 1) & _new(s, tile, group))
    def _():
        begun = (s > 0) & (tile[jnp.maximum(s - 1, 0)] == tile[s])
        before = jnp.where(begun, y[...], jnp.zeros_like(y))
        y[...] = jnp.where(_mine(y, tile[s], group[s], bounds), total[...].astype(y.dtype), before)


def _outer_kernel(tile, group, bounds, x, dy, dw, total):
    s, steps = pl.program_id(2), pl.num_programs(2)
    e = group[s]

    @pl.when((s == 0) | (group[jnp.maximum(s - 1, 0)] != e))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(_meet(s, tile, group, bounds, OUTER_ROWS))
    def _():
        left, right = (jnp.where(_mine(ref, tile[s], e, bounds), ref[...], jnp.zeros_like(ref)) for ref in (x, dy))
        total[...] += _product(left, right, ((0,), (0,)))

    @pl.when((s == steps - 1) | (group[jnp.minimum(s + 1, steps - 1)] != e))
    def _():
        dw[...] = total[...].astype(dw.dtype)


def _filled(meet: Meetings, s, rows: int):
    """The tile of step s, or the last that holds rows of a group: nothing is read after it."""
    last = jnp.maximum(meet.bounds[meet.bounds.shape[0] - 1] - 1, 0)
    return jnp.minimum(meet.tile[s], lax.div(last, rows))


def _new(s, tile, group):
    """Whether step s is a meeting: the steps that no meeting needs repeat the last."""
    before = jnp.maximum(s - 1, 0)
    return (s == 0) | (tile[before] != tile[s]) | (group[before] != group[s])


def _meet(s, tile, group, bounds, rows: int):
    """Whether step s brings rows of its group together for the first time."""
    begin, end = bounds[group[s]], bounds[group[s] + 1]
    return _new(s, tile, group) & (tile[s] * rows < end) & ((tile[s] + 1) * rows > begin) & (end > begin)


def _mine(ref, tile, e, bounds) -> jax.Array:
    """[rows of the tile, columns of `ref`]: whether the row is of group e."""
    row = tile * ref.shape[0] + _iota(ref, 0)
    return (row >= bounds[e]) & (row < bounds[e + 1])


def _iota(x, axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, axis)


def _product(left: jax.Array, right: jax.Array, contracted) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(left, right, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _block(n: int, most: int, cores: int = 1) -> int:
    """Columns of a block: all n, or the fewest blocks of whole registers at most so wide; as many for each core, if two share a device."""
    if n <= most:
        return n
    blocks = -(-n // (most * cores)) * cores
    return -(-n // (blocks * LANES)) * LANES
