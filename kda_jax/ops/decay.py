"""Decayed products inside one chunk, without ever forming a factor above 1.

With alpha_t = exp(g_t), the weight of token j at token i >= j is alpha_{j+1} ... alpha_i. Splitting it as exp(G_i) exp(-G_j)
overflows, and differences of cumulative sums cancel. Here it is split at the middle of the smallest power-of-two block that
holds both tokens: (product from the start of the later half to i) x (product from j + 1 to the end of the earlier half).
Both factors are products of numbers in [0, 1] built by doubling; they depend on tokens j .. i alone, so causality is bitwise,
and they are exact for alpha = 0, which is how a sequence boundary is written.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.triangular import DENSE, join_blocks


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


def channel_products(rows: list[Array], columns: Float[Array, "*batch C K"], tree: list[Level], dot) -> list[Array]:
    """For each r of `rows`: sum_c r_ic columns_jc (alpha_{j+1} ... alpha_i)_c where i > j, zero elsewhere.

    Args:
        rows: arrays [..., C, K].
        columns: [..., C, K].
        tree: `levels` of alpha.
        dot: (a [..., m, K], b [..., n, K]) -> a b^T.
    """
    C = columns.shape[-2]
    size = min(C, DENSE)
    joined = sum(_small_level(rows, columns, level, size, dot) for level in tree if level.size < size)
    if C == 1:
        joined = jnp.zeros((*columns.shape[:-2], 1, len(rows), 1, 1), columns.dtype)
    for level in tree:
        if size <= level.size < C:
            below = _crossing(rows, columns, level, level.size, dot)
            joined = join_blocks(joined[..., 0::2, :, :, :], below, joined[..., 1::2, :, :, :])
    return [joined[..., 0, i, :, :] for i in range(len(rows))]


def head_weights(tree: list[Level]) -> Float[Array, "*batch C C"]:
    """alpha_{j+1} ... alpha_i where i > j, 1 where i = j, zero elsewhere, for `levels` of alpha [..., C, 1]."""
    weights = jnp.ones((*tree[0].prefix.shape[:-1], 1, 1), tree[0].prefix.dtype)
    for level in tree[:-1]:
        later, earlier = _halves(level.prefix, level.size)[1], _halves(level.suffix, level.size)[0]
        weights = join_blocks(weights[..., 0::2, :, :], later * jnp.swapaxes(earlier, -1, -2), weights[..., 1::2, :, :])
    return weights[..., 0, :, :]


def _crossing(rows, columns, level, s, dot):
    """Products of later-half rows with earlier-half columns in every block of 2s tokens: [..., C/2s, R, s, s]."""
    prefix = _halves(level.prefix, s)[1]
    later = jnp.concatenate([_halves(r, s)[1] * prefix for r in rows], axis=-2)
    below = dot(later, _halves(columns, s)[0] * _halves(level.suffix, s)[0])
    return below.reshape(*below.shape[:-2], len(rows), s, s)


def _small_level(rows, columns, level, size, dot):
    """One level inside blocks of `size` tokens, as one product per block: [..., C/size, R, size, size].

    Later-half rows of all pairs against earlier-half columns of all pairs, then only those of the same pair are kept.
    """
    s, half, pairs = level.size, size // 2, size // 2 // level.size
    gather = lambda x, which: _halves(x, s)[which].reshape(*x.shape[:-2], -1, half, x.shape[-1])
    prefix = gather(level.prefix, 1)
    later = jnp.concatenate([gather(r, 1) * prefix for r in rows], axis=-2)
    product = dot(later, gather(columns, 0) * gather(level.suffix, 0))
    product = product.reshape(*product.shape[:-2], len(rows), pairs, s, pairs, s)
    same = jnp.eye(pairs, dtype=bool)[:, None, :, None]
    lead = ((0, 0),) * (product.ndim - 4)
    spread = jnp.pad(jnp.where(same, product, 0)[..., None, :, :, None, :], (*lead, (0, 0), (1, 0), (0, 0), (0, 0), (0, 1), (0, 0)))
    return spread.reshape(*product.shape[:-4], size, size)


def _halves(x, s):
    """Earlier and later halves of every block of 2s tokens: two arrays [..., C/2s, s, K]."""
    x = x.reshape(*x.shape[:-2], -1, 2, s, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _merge(earlier, later):
    x = jnp.stack([earlier, later], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])
