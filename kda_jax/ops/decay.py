"""Decayed products inside one chunk, without ever forming a factor above 1.

With alpha_t = exp(g_t), the weight of token j at token i >= j is alpha_{j+1} ... alpha_i. Splitting it as exp(G_i) exp(-G_j)
overflows, and differences of cumulative sums cancel. Here it is split at the middle of the smallest power-of-two block that
holds both tokens: (product from the start of the later half to i) x (product from j + 1 to the end of the earlier half).
Both factors are products of numbers in [0, 1] built by doubling; they depend on tokens j .. i alone, so causality is bitwise,
and they are exact for alpha = 0, which is how a sequence boundary is written.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kda_jax.ops.triangular import DENSE, HIGHEST, join_blocks


class Level(NamedTuple):
    """Products of alpha inside blocks of `size` tokens: one step of the doubling."""

    size: int
    prefix: Array
    """[..., C, K]: from the block's first token to this one, both included."""
    suffix: Array
    """[..., C, K]: from the token after this one to the block's last."""


def levels(alpha: Float[Array, "*batch C K"]) -> list[Level]:
    """Prefix and suffix products in blocks of 1, 2, 4 .. C tokens."""
    size, prefix, suffix = 1, alpha, jnp.ones_like(alpha)
    tree = [Level(size, prefix, suffix)]
    while size < alpha.shape[-2]:
        p0, p1 = _halves(prefix, size)
        s0, s1 = _halves(suffix, size)
        prefix = _merge(p0, p1 * p0[..., -1:, :])
        suffix = _merge(s0 * p1[..., -1:, :], s1)
        size *= 2
        tree.append(Level(size, prefix, suffix))
    return tree


def channel_products(rows: list[Array], columns: Float[Array, "*batch C K"], tree: list[Level], dot_t) -> list[Array]:
    """For each r of `rows`: P_ij = sum_c r_ic columns_jc (alpha_{j+1} ... alpha_i)_c where i > j, zero elsewhere.

    Args:
        rows: arrays [..., C, K].
        columns: [..., C, K].
        tree: `levels` of alpha.
        dot_t: (a [..., m, K], b [..., n, K]) -> a b^T.
    """
    C = columns.shape[-2]
    size = min(C, DENSE)
    joined = jnp.zeros((*columns.shape[:-2], C // size, len(rows), size, size), columns.dtype)
    for level in tree[:-1]:
        later, earlier = _factors(rows, columns, level, size)
        product = dot_t(later, earlier)
        if level.size < size:
            joined = joined + _spread_pairs(product, level.size, len(rows))
        else:
            below = product.reshape(*product.shape[:-2], len(rows), level.size, level.size)
            joined = join_blocks(joined[..., 0::2, :, :, :], below, joined[..., 1::2, :, :, :])
    return [joined[..., 0, i, :, :] for i in range(len(rows))]


def channel_products_transpose(
    cotangents: list[Array], rows: list[Array], columns: Float[Array, "*batch C K"], tree: list[Level], dot, t_dot
) -> tuple[list[Array], Array, Array]:
    """Cotangents of rows, columns and g = log alpha of `channel_products`; only the strictly lower part of dP is read.

    A factor alpha_a ... alpha_b times its cotangent is what each of g_a .. g_b gains by it. Summed factor by factor, every term
    of a dg belongs to it. The shorter sum over all i >= t of what rows gain less what columns do, in which the products that
    end before t or begin after it cancel, leaves an error that a whole chunk shares: 10 to 50 times as much in the gradients of
    A_log and dt_bias, which add up over tokens.

    Args:
        cotangents: dP for each of `rows`, [..., C, C].
        dot, t_dot: a b and a^T b.
    """
    size = min(columns.shape[-2], DENSE)
    drows, dcolumns, dg = [jnp.zeros_like(r) for r in rows], jnp.zeros_like(columns), jnp.zeros_like(columns)
    small = []
    for level in tree[:-1]:
        s = level.size
        later, earlier = _factors(rows, columns, level, size)
        if s < size:
            dproduct = jnp.concatenate([_gather_pairs(c, s, size) for c in cotangents], axis=-2)
        else:
            dproduct = jnp.concatenate([_below_diagonal(c, s) for c in cotangents], axis=-2)
        dlater, dearlier = dot(dproduct, earlier), t_dot(dproduct, later)
        gains = later * dlater, earlier * dearlier
        gains = sum(jnp.split(gains[0], len(rows), axis=-2)), gains[1]
        if s < size:
            small += gains
        else:
            lower = jnp.tril(jnp.ones((s, s), dg.dtype))
            dg = dg + _merge(masked_sum(lower - jnp.eye(s, dtype=dg.dtype), gains[1]), masked_sum(lower.mT, gains[0]))
        prefix, suffix = _halves(level.prefix, s)[1], _halves(level.suffix, s)[0]
        for i, d in enumerate(jnp.split(dlater, len(rows), axis=-2)):
            d0, d1 = _halves(drows[i], s)
            drows[i] = _merge(d0, d1 + d.reshape(d1.shape) * prefix)
        d0, d1 = _halves(dcolumns, s)
        dcolumns = _merge(d0 + dearlier.reshape(d0.shape) * suffix, d1)
    if small:
        dg = dg + masked_sum(jnp.asarray(_members(size), dg.dtype), jnp.concatenate(small, axis=-2)).reshape(dg.shape)
    return drows, dcolumns, dg


def masked_sum(a: Array, b: Array) -> Array:
    """a b where one of the two holds ones and zeros: sums, at full precision."""
    return jnp.matmul(a, b, precision=HIGHEST)


def _members(size: int) -> np.ndarray:
    """[size, (later, earlier) x levels x size/2]: which tokens a factor decays through, for the factors that `_factors` gathers from a
    block of `size` tokens at its levels of 1, 2 .. size/2: in a later half from its first token to i, in an earlier one from j + 1 on.
    """
    t, parts, s = np.arange(size)[:, None], [], 1
    while s < size:
        p = np.arange(size // 2)
        begin = p // s * 2 * s
        i, j = begin + s + p % s, begin + p % s
        parts += [(begin + s <= t) & (t <= i), (j < t) & (t < begin + s)]
        s *= 2
    return np.concatenate(parts, axis=1)


def head_weights(tree: list[Level]) -> Float[Array, "*batch C C"]:
    """alpha_{j+1} ... alpha_i where i > j, 1 where i = j, zero elsewhere, for `levels` of alpha [..., C, 1]."""
    weights = jnp.ones((*tree[0].prefix.shape[:-1], 1, 1), tree[0].prefix.dtype)
    for level in tree[:-1]:
        later, earlier = _halves(level.prefix, level.size)[1], _halves(level.suffix, level.size)[0]
        weights = join_blocks(weights[..., 0::2, :, :], later * jnp.swapaxes(earlier, -1, -2), weights[..., 1::2, :, :])
    return weights[..., 0, :, :]


def _factors(rows, columns, level, size):
    """Rows of the later halves and columns of the earlier halves, decayed: [..., n, R m, K] and [..., n, m, K].

    m = s for levels of at least `size` tokens; smaller ones gather the m = size / 2 such tokens of every block of `size`, and
    what a product holds outside the pairs is dropped by `_spread_pairs` and `_gather_pairs`.
    """
    s = level.size
    m = max(s, size // 2)
    half = lambda x, which: _halves(x, s)[which].reshape(*x.shape[:-2], -1, m, x.shape[-1])
    prefix = half(level.prefix, 1)
    later = jnp.concatenate([half(r, 1) * prefix for r in rows], axis=-2)
    return later, half(columns, 0) * half(level.suffix, 0)


def _spread_pairs(product, s, count):
    """[..., n, R size/2, size/2] -> [..., n, R, size, size]: products of later and earlier halves of s tokens put in place."""
    half = product.shape[-1]
    pairs = half // s
    product = product.reshape(*product.shape[:-2], count, pairs, s, pairs, s)
    product = jnp.where(jnp.eye(pairs, dtype=bool)[:, None, :, None], product, 0)
    lead = ((0, 0),) * (product.ndim - 4)
    placed = jnp.pad(product[..., None, :, :, None, :], (*lead, (0, 0), (1, 0), (0, 0), (0, 0), (0, 1), (0, 0)))
    return placed.reshape(*product.shape[:-4], 2 * half, 2 * half)


def _gather_pairs(P, s, size):
    """Transpose of `_spread_pairs` for one P [..., C, C]: [..., C/size, size/2, size/2]."""
    n, pairs = P.shape[-1] // size, size // (2 * s)
    blocks = P.reshape(*P.shape[:-2], n, size, n, size)
    blocks = jnp.stack([blocks[..., i, :, i, :] for i in range(n)], axis=-3)
    blocks = blocks.reshape(*blocks.shape[:-2], pairs, 2, s, pairs, 2, s)[..., :, 1, :, :, 0, :]
    blocks = jnp.where(jnp.eye(pairs, dtype=bool)[:, None, :, None], blocks, 0)
    return blocks.reshape(*blocks.shape[:-4], size // 2, size // 2)


def _below_diagonal(P, s):
    """Blocks (1, 0), (3, 2) .. of P [..., C, C] cut in blocks of s: [..., C/2s, s, s]."""
    n = P.shape[-1] // s
    blocks = P.reshape(*P.shape[:-2], n, s, n, s)
    return jnp.stack([blocks[..., i + 1, :, i, :] for i in range(0, n, 2)], axis=-3)


def _halves(x, s):
    """Earlier and later halves of every block of 2s tokens: two arrays [..., C/2s, s, K]."""
    x = x.reshape(*x.shape[:-2], -1, 2, s, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _merge(earlier, later):
    x = jnp.stack([earlier, later], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])
