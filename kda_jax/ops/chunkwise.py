"""The chunkwise form of the whole family, forward and backward, in plain jnp.

Per chunk of C tokens with start state S (Kimi Linear, arXiv 2510.26692, eqs. 6-9; Gated DeltaNet, arXiv 2412.06464):

    A_ij   = beta_i sum_c k_ic k_jc w_ijc   (i > j)      w_ij = alpha_{j+1} ... alpha_i
    Aqk_ij = sum_c q_ic k_jc w_ijc          (i >= j)
    y      = (I + A)^-1 beta (v - k_in S)                 k_in, q_in = k, q decayed from the chunk's start
    o      = q_in S + Aqk y
    S'     = Diag(total) S + k_out^T y                    k_out = k decayed to the chunk's end

This is the solve form: the corrected values y come from one triangular solve, so neither direction needs the usual w and u.
Without the delta rule y = v. The backward keeps one state per group of chunks and rebuilds the rest.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.decay import channel_products, head_weights, levels
from kda_jax.ops.triangular import unit_lower_inverse

# Tokens x heads that one scan step prepares together: enough to fill a device, small enough to stay in cache or on chip.
GROUP_TOKEN_HEADS = 4096


class Terms(NamedTuple):
    """What a chunk does to any state: everything but v and S. Leading axes [n, B, HV]."""

    A: Array | None
    Aqk: Array
    q_in: Array
    k_in: Array
    k_out: Array
    total: Array
    """[..., K, 1] or [..., 1, 1]: decay of the state over the whole chunk."""


def chunkwise(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Array | None,
    beta: Float[Array, "B T HV"] | None,
    *,
    scale: float,
    initial_state: Float[Array, "B HV K V"],
    chunk_size: int,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Outputs and final state of S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T, o = scale S_t^T q.

    Args:
        g: log decay <= 0: None, [B, T, HV] or [B, T, HV, K].
        beta: None leaves out the delta rule: S_t = Diag(exp g) S_{t-1} + k v^T.
        initial_state: its dtype is the dtype of all state and gate maths.
        chunk_size: power of two.

    Numerics: float32 (or float64) throughout; matrix products of 16-bit inputs run at the device's default precision, those of
        float32 inputs at the highest.
    """
    B, T = q.shape[:2]
    static = _Static(scale, chunk_size, jax.lax.Precision.HIGHEST if q.dtype.itemsize >= 4 else jax.lax.Precision.DEFAULT)
    chunks = -(-T // chunk_size)
    length = chunk_size * max(1, min(chunks, GROUP_TOKEN_HEADS // (B * v.shape[2] * chunk_size)))
    if g is not None and g.ndim == 3:
        g = g[..., None]
    if beta is not None:
        beta = beta[..., None]
    # Padding with zeros (no decay, no write) changes nothing.
    groups = jax.tree.map(functools.partial(_to_groups, length=length), (q, k, v, g, beta))
    o, state = _scan_groups(static, groups, initial_state)
    return _from_groups(o, T), state


class _Static(NamedTuple):
    scale: float
    chunk_size: int
    precision: jax.lax.Precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_groups(static, groups, state):
    return _forward(static, groups, state)[0]


def _forward(static, groups, state):
    def body(state, group):
        terms, v, beta = _prepare(static, state.dtype, *group)
        X = None if terms.A is None else unit_lower_inverse(terms.A)
        end, (_, o, _) = jax.lax.scan(functools.partial(_chunk, static), state, (terms._replace(A=X), v, beta))
        return end, (_join(o).astype(group[2].dtype), state)

    state, (o, starts) = jax.lax.scan(body, state, groups)
    return (o, state), (groups, starts)


def _backward(static, residuals, cotangents):
    groups, starts = residuals
    do, dstate = cotangents

    def body(dstate, xs):
        group, start, do = xs
        (terms, v, beta), pull = jax.vjp(functools.partial(_prepare, static, start.dtype), *group)
        X = None if terms.A is None else unit_lower_inverse(terms.A)
        solved = terms._replace(A=X)
        _, (states, _, y) = jax.lax.scan(functools.partial(_chunk, static), start, (solved, v, beta))
        do = _split(do.astype(start.dtype), static.chunk_size)
        step = functools.partial(_chunk_transpose, static)
        dstate, (dends, dy, du) = jax.lax.scan(step, dstate, (solved, beta, do), reverse=True)
        return dstate, pull(_local_cotangents(static, terms, v, beta, states, y, do, dends, dy, du))

    dstate, dgroups = jax.lax.scan(body, dstate, (groups, starts, do), reverse=True)
    return dgroups, dstate


_scan_groups.defvjp(_forward, _backward)


def _prepare(static, dtype, q, k, v, g, beta):
    """Everything in a group of chunks that does not need the state; q, k, v, g, beta are [B, n C, heads, .]."""
    dot = functools.partial(_dot_t, static)
    q, k, v, g, beta = jax.tree.map(lambda x: _split(x.astype(dtype), static.chunk_size), (q, k, v, g, beta))
    q = q * static.scale
    groups = v.shape[2] // q.shape[2]  # value heads that share one q and k head
    share = lambda x: jnp.repeat(x, groups, axis=2)
    lower = jnp.tril(jnp.ones((static.chunk_size,) * 2, bool))
    if g is not None and g.shape[-1] > 1:
        q, k = share(q), share(k)
        tree = levels(jnp.exp(g))
        rows = [q] if beta is None else [q, k]
        Aqk, *A = channel_products(rows, k, tree, dot)
        Aqk = Aqk + jnp.sum(q * k, axis=-1)[..., None] * jnp.eye(static.chunk_size, dtype=dtype)
        A = None if beta is None else beta * A[0]
    else:
        weights = lower.astype(dtype)
        if g is not None:
            tree = levels(jnp.exp(g))
            weights = head_weights(tree)
        Aqk = share(dot(q, k)) * weights
        A = None if beta is None else beta * share(dot(k, k)) * jnp.where(jnp.eye(static.chunk_size, dtype=bool), 0, weights)
        q, k = share(q), share(k)
    if g is None:
        return Terms(A, Aqk, q, k, k, jnp.ones((*v.shape[:3], 1, 1), dtype)), v, beta
    whole = tree[-1]
    total = jnp.swapaxes(whole.prefix[..., -1:, :], -1, -2)
    return Terms(A, Aqk, q * whole.prefix, k * whole.prefix, k * whole.suffix, total), v, beta


def _chunk(static, S, xs):
    """One chunk, with the inverse X in place of A. Returns S' and (S, o, y)."""
    terms, v, beta = xs
    dot = functools.partial(_dot, static)
    y = v if terms.A is None else dot(terms.A, beta * (v - dot(terms.k_in, S)))
    o = dot(terms.q_in, S) + dot(terms.Aqk, y)
    return terms.total * S + _t_dot(static, terms.k_out, y), (S, o, y)


def _chunk_transpose(static, dS, xs):
    """Reverse of `_chunk` for the values that later chunks wait for. Takes and returns dS; keeps (dS', dy, du = d(v - k_in S))."""
    terms, beta, do = xs
    dot, t_dot = functools.partial(_dot, static), functools.partial(_t_dot, static)
    dy = t_dot(terms.Aqk, do) + dot(terms.k_out, dS)
    dstart = terms.total * dS + t_dot(terms.q_in, do)
    if terms.A is None:
        return dstart, (dS, dy, dy)
    du = t_dot(terms.A, dy)
    return dstart - t_dot(terms.k_in, beta * du), (dS, dy, du)


def _local_cotangents(static, terms, v, beta, S, y, do, dS, dy, dr):
    """Cotangents of (terms, v, beta) for a whole group, given what the two passes over its chunks left behind."""
    dot_t = functools.partial(_dot_t, static)
    dtotal = jnp.sum(S * dS, axis=-1, keepdims=True)
    if terms.total.shape[-2] == 1:
        dtotal = jnp.sum(dtotal, axis=-2, keepdims=True)
    dAqk = jnp.tril(dot_t(do, y))
    if terms.A is None:
        return Terms(None, dAqk, dot_t(do, S), jnp.zeros_like(terms.k_in), dot_t(y, dS), dtotal), dy, None
    dbeta = jnp.sum(dr * (v - _dot(static, terms.k_in, S)), axis=-1, keepdims=True)
    dA = -jnp.tril(dot_t(dr, y), -1)  # y = (I + A)^-1 r, so dA = -dr y^T: the inverse itself is never differentiated
    return Terms(dA, dAqk, dot_t(do, S), -dot_t(beta * dr, S), dot_t(y, dS), dtotal), beta * dr, dbeta


def _dot(static, a, b):
    return jnp.matmul(a, b, precision=static.precision)


def _dot_t(static, a, b):
    """a b^T."""
    return jnp.einsum("...ik,...jk->...ij", a, b, precision=static.precision)


def _t_dot(static, a, b):
    """a^T b."""
    return jnp.einsum("...ki,...kj->...ij", a, b, precision=static.precision)


def _to_groups(x, length):
    """[B, T, ...] -> [G, B, length, ...], padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % length)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0)


def _from_groups(x, T):
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :T]


def _split(x, C):
    """[B, n C, H, K] -> [n, B, H, C, K]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), (1, 3), (0, 2))


def _join(x):
    """[n, B, H, C, V] -> [B, n C, H, V]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])
