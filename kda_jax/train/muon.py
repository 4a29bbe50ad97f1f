"""Muon: momentum whose matrices are made orthogonal, for every matrix of a model at once.

A gradient step in the spectral norm (Jordan et al. 2024; Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982). What counts
as one matrix matters: stacked layers and experts are matrices of their own, and so are the heads of q, k and v (Kimi K3, arXiv
2607.24653, section 2.5), which lie side by side in one kernel and would otherwise share their singular values.

`optax.contrib.muon` is not used for three reasons: its dimension numbers choose whole axes, so that it sees no heads inside a kernel; it
flattens leading axes, which gathers experts that are sharded; and it has all stacked layers in memory at once. On a single matrix the
two agree, which is a test.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from kda_jax import sharding
from kda_jax.train.state import path_name

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of X, X X^T X and (X X^T)^2 X: steepest at 0 among those that keep singular values near 1 (Jordan et al. 2024)."""
_EPS = 1e-7


class MuonState(NamedTuple):
    momentum: Any
    """The tree of the parameters."""


def scale_by_muon(
    *,
    momentum: float,
    update_rms: float,
    splits: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, sharding.Names],
    compute_dtype: Any,
    moment_dtype: Any,
) -> optax.GradientTransformation:
    """M <- momentum M + G;  update = update_rms sqrt(max(rows, columns)) orthogonal(M), matrix by matrix.

    Moonlight (arXiv 2502.16982, eq. 4) without Nesterov's look-ahead, as Kimi K2 (arXiv 2507.20534, algorithm 1) has it: an orthogonal
    matrix has RMS 1 / sqrt(max(rows, columns)), so every update has RMS `update_rms` whatever its shape.

    Args:
        momentum: of the running sum, in 0..1.
        update_rms: 0.2 is about what AdamW's updates have.
        splits: column widths of the matrices side by side in a parameter, by its dotted name (`state.splits`).
        axes: logical names of the axes of parameters, by their dotted names.
        compute_dtype: of the iteration; float32 runs at the highest matmul precision.
        moment_dtype: that M is stored in. It is computed in float32.

    Sharding: experts are spread over the devices, whole matrices each, and go back afterwards. Heads stay where they are, and the rows of
        other matrices too: that costs a sum over the shards of the small product X X^T in each step of the iteration.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, dtype=moment_dtype), params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        moved = jax.tree.map(lambda m, g: momentum * m.astype(jnp.float32) + g, state.momentum, grads)

        def one(path: tuple, m: Array) -> Array:
            name = path_name(path)
            scaled = functools.partial(_scaled, widths=splits.get(name, m.shape[-1:]), rms=update_rms, dtype=compute_dtype)

            def matrices(x: Array) -> Array:
                return scaled(x) if x.ndim < 3 else _spread(scaled, x, axes[name])

            # One stacked layer at a time: the iteration needs room for several copies of what it works on.
            return jax.lax.map(matrices, m) if "periods" in name.split(".") else matrices(m)

        updates = jax.tree_util.tree_map_with_path(one, moved)
        return updates, MuonState(jax.tree.map(lambda m: m.astype(moment_dtype), moved))

    return optax.GradientTransformation(init, update)


def _spread(f: Callable[[Array], Array], x: Float[Array, "n rows C"], names: sharding.Names) -> Float[Array, "n rows C"]:
    """f(x), its n matrices spread over all devices: an owner of experts shares them out among those that store parts of them, and where
    their number does not divide, matrices of zeros make it up, so that no device works on many for want of a few."""
    owners = sharding.parts("experts", len(x))
    own = len(x) // owners
    even = sharding.evened("matrices", own, beside=("experts", owners))
    apart = lambda x: sharding.constrain(x, "experts", "matrices", None, None)  # before and after: what lies between follows both
    x = jnp.pad(x.reshape(owners, own, *x.shape[1:]), ((0, 0), (0, even - own), (0, 0), (0, 0)))
    return sharding.store(apart(f(apart(x)))[:, :own].reshape(-1, *x.shape[2:]), names)


def _scaled(x: Float[Array, "*n rows C"], widths: tuple[int, ...], rms: float, dtype: Any) -> Float[Array, "*n rows C"]:
    """Every matrix of `widths` columns made orthogonal and scaled; the pattern of widths repeats over the columns."""
    heads = jnp.moveaxis(x.reshape(*x.shape[:-1], -1, sum(widths)), -2, -3)  # [..., heads, rows, sum(widths)]
    edges = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    blocks = [rms * max(block.shape[-2:]) ** 0.5 * orthogonal(block, dtype) for block in jnp.split(heads, edges, axis=-1)]
    return jnp.moveaxis(jnp.concatenate(blocks, axis=-1), -3, -2).reshape(x.shape)


def orthogonal(x: Float[Array, "*n rows C"], dtype: Any = jnp.float32) -> Float[Array, "*n rows C"]:
    """About U V^T of each matrix x = U S V^T, by Newton-Schulz iteration.

    X <- a X + b X X^T X + c (X X^T)^2 X, five times from x / |x|_F, on the side on which X X^T is the smaller. Singular values of at
    least about 1e-3 of the norm end between 0.7 and 1.2; exactness is not the aim (Jordan et al. 2024). A matrix of zeros stays zero.

    Args:
        x: [..., rows, columns]; leading axes count matrices.
        dtype: of the iteration. bfloat16 moves the result by about 6% of its RMS, which training does not notice (Jordan et al. 2024).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kda_jax.train.muon import orthogonal
        >>> s = jnp.linalg.svd(orthogonal(jax.random.normal(jax.random.key(0), (8, 4))), compute_uv=False)
        >>> bool(((s > 0.6) & (s < 1.25)).all())
        True
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    wide = jnp.swapaxes(x, -1, -2) if tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    precision = jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT

    def step(_: Array, X: Array) -> Array:
        A = jnp.einsum("...ij,...kj->...ik", X, X, precision=precision)
        B = b * A + c * jnp.einsum("...ij,...jk->...ik", A, A, precision=precision)
        return a * X + jnp.einsum("...ij,...jk->...ik", B, X, precision=precision)

    X = jax.lax.fori_loop(0, STEPS, step, (wide / (norm + _EPS)).astype(dtype)).astype(x.dtype)
    return jnp.swapaxes(X, -1, -2) if tall else X
