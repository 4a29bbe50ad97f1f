"""Inverse of I + A for strictly lower triangular A, by block doubling."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST
DENSE = 16  # below this size whole blocks are multiplied: 16 x 16 products cost less than many smaller ones


def unit_lower_inverse(A: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + A)^-1 by the ladder: blocks of 1, 2, 4 .. C/2 rows are inverted and joined.

    [[I + A0, 0], [P, I + A1]]^-1 = [[X0, 0], [-X1 P X0, X1]] with Xi = (I + Ai)^-1. No power of A is formed, so every
    intermediate stays at the size of the true inverse; series in powers of A blow up on correlated keys.

    Args:
        A: strictly lower triangular, C a power of two; entries on and above the diagonal must be zero.
    """
    C = A.shape[-1]
    size = min(C, DENSE)
    X = _dense_ladder(_diagonal_blocks(A, size))
    while size < C:
        P = _below_diagonal_blocks(A, size)
        X0, X1 = X[..., 0::2, :, :], X[..., 1::2, :, :]
        X = join_blocks(X0, -_dot(_dot(X1, P), X0), X1)
        size *= 2
    return X[..., 0, :, :]


def join_blocks(upper: Float[Array, "*n s s"], below: Float[Array, "*n s s"], lower: Float[Array, "*n s s"]) -> Float[Array, "*n S S"]:
    """[[upper, 0], [below, lower]]."""
    top = jnp.concatenate([upper, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, lower], axis=-1)], axis=-2)


def _dense_ladder(A):
    """The same ladder on blocks of at most 16 rows, as X <- X - X L X with L the part of A that joins two neighbours."""
    row, column = jnp.arange(A.shape[-1])[:, None], jnp.arange(A.shape[-1])
    X = jnp.eye(A.shape[-1], dtype=A.dtype) - jnp.where((row // 2 == column // 2), A, 0)
    s = 2
    while s < A.shape[-1]:
        L = jnp.where((row // (2 * s) == column // (2 * s)) & (row // s != column // s), A, 0)
        X = X - _dot(_dot(X, L), X)
        s *= 2
    return X


def _diagonal_blocks(A, size):
    n = A.shape[-1] // size
    blocks = A.reshape(*A.shape[:-2], n, size, n, size)
    return jnp.stack([blocks[..., i, :, i, :] for i in range(n)], axis=-3)


def _below_diagonal_blocks(A, size):
    """Blocks (1, 0), (3, 2), (5, 4) .. of A cut in blocks of `size`."""
    n = A.shape[-1] // size
    blocks = A.reshape(*A.shape[:-2], n, size, n, size)
    return jnp.stack([blocks[..., i + 1, :, i, :] for i in range(0, n, 2)], axis=-3)


def _dot(a, b):
    return jnp.matmul(a, b, precision=HIGHEST)
