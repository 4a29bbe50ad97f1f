"""The chunkwise form of the whole family, forward and backward, in plain jnp.

Per chunk of C tokens with start state S (Kimi Linear, arXiv 2510.26692, eqs. 6-9; Gated DeltaNet, arXiv 2412.06464):

    A_ij   = beta_i sum_c k_ic k_jc w_ijc   (i > j)      w_ij = alpha_{j+1} ... alpha_i
    Aqk_ij = sum_c q_ic k_jc w_ijc          (i >= j)
    y      = (I + A)^-1 beta (v - k_in S)                 k_in, q_in = k, q decayed from the chunk's start
    o      = q_in S + Aqk y
    S'     = Diag(total) S + k_out^T y                    k_out = k decayed to the chunk's end

This is the solve form: the corrected values y come from one triangular solve, so neither direction needs the usual w and u.
Without the delta rule y = v. The backward keeps the state and (I + A)^-1 of every chunk and rebuilds the rest, a group of chunks
at a time. Only S and y wait for the chunk before; everything else is computed for the whole group at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax import sharding
from kda_jax.ops.decay import channel_products, channel_products_transpose, head_weights, levels, masked_sum
from kda_jax.ops.triangular import HIGHEST, unit_lower_inverse

# Tokens x heads that one scan step prepares together: small enough to stay in a CPU's cache, large enough to fill an accelerator.
GROUP_TOKEN_HEADS = {"cpu": 2**10, "accelerator": 2**18}
# On a CPU groups are always whole, of at least this many tokens, and two at least: loops of other lengths compile to other rounding, so
# that appending tokens would change bits before them.
GROUP_TOKENS = 64


class Terms(NamedTuple):
    """What a chunk does to any state: everything but v and S. Leading axes [n, B, HV]."""

    Akk: Array | None
    """[..., C, C]: A without beta."""
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
    groups, static = _groups(q, k, v, g, beta, scale, chunk_size)
    o, state, _ = _scan_groups(static, groups, initial_state)
    return _from_groups(o, q.shape[1]), state


def chunkwise_states(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Array | None,
    beta: Float[Array, "B T HV"] | None,
    *,
    scale: float,
    initial_state: Float[Array, "B HV K V"],
    chunk_size: int,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"], Float[Array, "N B HV K V"]]:
    """`chunkwise`, and the state before every chunk: N = ceil(T / chunk_size)."""
    groups, static = _groups(q, k, v, g, beta, scale, chunk_size)
    o, state, states = _scan_groups(static._replace(keep_states=True), groups, initial_state)
    states = states.reshape(-1, *states.shape[2:])
    return _from_groups(o, q.shape[1]), state, states[: -(-q.shape[1] // chunk_size)]


def _groups(q, k, v, g, beta, scale, chunk_size):
    """The inputs as [count, B, length, heads, .], and what is static."""
    B, T = q.shape[:2]
    static = _Static(scale, chunk_size, HIGHEST if q.dtype.itemsize >= 4 else jax.lax.Precision.DEFAULT)
    cpu = sharding.platform() == "cpu"
    budget = GROUP_TOKEN_HEADS["cpu" if cpu else "accelerator"]
    most = max(1, GROUP_TOKENS // chunk_size, budget // (B * v.shape[2] * chunk_size))
    length = chunk_size * (most if cpu else min(most, -(-T // chunk_size)))
    if g is not None and g.ndim == 3:
        g = g[..., None]
    if beta is not None:
        beta = beta[..., None]
    # Padding with zeros (no decay, no write) changes nothing.
    count = max(-(-T // length), 2 if cpu else 1)
    return jax.tree.map(functools.partial(_to_groups, length=length, count=count), (q, k, v, g, beta)), static


class _Static(NamedTuple):
    scale: float
    chunk_size: int
    precision: jax.lax.Precision
    keep_states: bool = False
    """Whether the state before every chunk is a result."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_groups(static, groups, state):
    return _forward(static, groups, state)[0]


def _forward(static, groups, state):
    state = _opaque(state)

    def body(state, group):
        v, beta, terms, _ = _prepare(static, state.dtype, *group)
        X = _inverse(terms, beta)
        end, (states, y) = jax.lax.scan(functools.partial(_chunk, static), state, (terms.k_in, terms.k_out, terms.total, X, v, beta))
        o = _dot(static, terms.q_in, states) + _dot(static, terms.Aqk, y)
        return end, (_join(o).astype(group[2].dtype), states, X)

    state, (o, states, X) = jax.lax.scan(body, state, groups)
    return (o, state, states if static.keep_states else None), (groups, states, X)


def _backward(static, residuals, cotangents):
    groups, states, X = residuals
    do, dstate, dstates = cotangents
    dstate = _opaque(dstate)

    def body(dstate, xs):
        group, states, X, do, dstates = xs
        v, beta, terms, saved = _prepare(static, states.dtype, *group)
        y = _corrected(static, terms.k_in, X, v, beta, states)
        do = _split(do.astype(states.dtype), static.chunk_size)
        to_y, to_states = _t_dot(static, terms.Aqk, do), _t_dot(static, terms.q_in, do)
        to_states = to_states if dstates is None else to_states + dstates
        step = functools.partial(_chunk_transpose, static)
        dstate, (dends, dr) = jax.lax.scan(step, dstate, (terms.k_in, terms.k_out, terms.total, X, beta, to_y, to_states), reverse=True)
        dterms, dv, dbeta = _terms_cotangents(static, terms, v, beta, states, y, do, dends, dr)
        dq, dk, dg = _prepare_transpose(static, group[0].shape[2], terms, saved, dterms)
        dgroup = jax.tree.map(lambda x, d: _join(d).astype(x.dtype), group, (dq, dk, dv, dg, dbeta))
        return dstate, dgroup

    dstate, dgroups = jax.lax.scan(body, dstate, (groups, states, X, do, dstates), reverse=True)
    return dgroups, dstate


_scan_groups.defvjp(_forward, _backward)


def _prepare(static, dtype, q, k, v, g, beta):
    """Everything in a group of chunks that does not need the state; q, k, v, g, beta are [B, n C, heads, .].

    Returns v and beta in chunks, the terms, and (q, k in chunks, levels of alpha) for the transpose.
    """
    dot_t = functools.partial(_dot_t, static)
    q, k, v, g, beta = jax.tree.map(lambda x: _split(x.astype(dtype), static.chunk_size), (q, k, v, g, beta))
    q = q * static.scale
    tree = None if g is None else levels(jnp.exp(g))
    if g is not None and g.shape[-1] > 1:
        q, k = _share(q, v), _share(k, v)
        Aqk, *Akk = channel_products([q] if beta is None else [q, k], k, tree, dot_t)
        Aqk = Aqk + jnp.sum(q * k, axis=-1)[..., None] * jnp.eye(static.chunk_size, dtype=dtype)
        Akk = Akk[0] if Akk else None
        saved = q, k, tree
    else:
        weights = _lower(static, v) if g is None else head_weights(tree)
        Aqk = _share(dot_t(q, k), v) * weights
        Akk = None if beta is None else _share(dot_t(k, k), v) * jnp.tril(weights, -1)
        saved = q, k, tree, weights
        q, k = _share(q, v), _share(k, v)
    if g is None:
        return v, beta, Terms(Akk, Aqk, q, k, k, jnp.ones((*v.shape[:3], 1, 1), dtype)), saved
    prefix, suffix = tree[-1].prefix, tree[-1].suffix
    return v, beta, Terms(Akk, Aqk, q * prefix, k * prefix, k * suffix, jnp.swapaxes(prefix[..., -1:, :], -1, -2)), saved


def _prepare_transpose(static, heads, terms, saved, d):
    """Cotangents of q, k and g in chunks, given those of the terms; `heads` is the number of q and k heads."""
    transpose = _head_transpose if len(saved) == 4 else _channel_transpose
    dq, dk, dg = transpose(static, heads, terms, *saved, d)
    if dg is not None:
        dg = dg + jnp.swapaxes(d.total * terms.total, -1, -2)
    return static.scale * _unshare(dq, heads), _unshare(dk, heads), dg


def _channel_transpose(static, heads, terms, q, k, tree, d):
    """g_t gets what rows i >= t gain on their way from the chunk's start, what columns j < t gain on theirs to its end, and what the
    products inside gain.
    """
    prefix, suffix = tree[-1].prefix, tree[-1].suffix
    dq, dk_row, dk_column = d.q_in * prefix, d.k_in * prefix, d.k_out * suffix
    entering, leaving = q * dq + k * dk_row, k * dk_column
    rows, dproducts = ([q], [d.Aqk]) if d.Akk is None else ([q, k], [d.Aqk, d.Akk])
    (dq_inside, *dk_inside), dk, dg = channel_products_transpose(
        dproducts, rows, k, tree, functools.partial(_dot, static), functools.partial(_t_dot, static)
    )
    dq, dk_row = dq + dq_inside, dk_row + sum(dk_inside)
    lower = _lower(static, entering)
    dg = dg + masked_sum(lower.mT, entering) + masked_sum(jnp.tril(lower, -1), leaving)
    diagonal = jnp.diagonal(d.Aqk, axis1=-2, axis2=-1)[..., None]  # no decay between a token and itself
    return dq + diagonal * k, dk_row + dk_column + dk + diagonal * q, dg


def _head_transpose(static, heads, terms, q, k, tree, weights, d):
    """With one decay per head the weights multiply finished products, and g_t gets the sum of dA * A over i >= t > j."""
    dot, t_dot = functools.partial(_dot, static), functools.partial(_t_dot, static)
    prefix, suffix = (1, 1) if tree is None else (tree[-1].prefix, tree[-1].suffix)
    dq, dk_row, dk_column = d.q_in * prefix, d.k_in * prefix, d.k_out * suffix
    dg = None
    if tree is not None:
        total = lambda x: jnp.sum(x, axis=-1, keepdims=True)
        moved = d.Aqk * terms.Aqk + (0 if d.Akk is None else d.Akk * terms.Akk)
        lower = _lower(static, moved)
        before = jnp.tril(lower, -1)
        dg = total(jnp.triu(masked_sum(moved, before.mT).mT))
        dg = dg + masked_sum(lower.mT, total(_share(q, dq) * dq + _share(k, dq) * dk_row))
        dg = dg + masked_sum(before, total(_share(k, dq) * dk_column))
    dqk = _unshare(d.Aqk * weights, heads)
    dq, dk = _unshare(dq, heads) + dot(dqk, k), _unshare(dk_row + dk_column, heads) + t_dot(dqk, q)
    if d.Akk is not None:
        dkk = _unshare(d.Akk * weights, heads)
        dk = dk + dot(dkk, k) + t_dot(dkk, k)
    return dq, dk, dg


def _inverse(terms, beta):
    return None if terms.Akk is None else unit_lower_inverse(beta * terms.Akk)


def _corrected(static, k_in, X, v, beta, S):
    """y, the values that are written: of one chunk, or of many at once when their start states are known."""
    return v if X is None else _dot(static, X, beta * (v - _dot(static, k_in, S)))


def _chunk(static, S, xs):
    """What has to wait for the state of the chunk before: S', and (S, y) for what need not."""
    k_in, k_out, total, X, v, beta = xs
    y = _corrected(static, k_in, X, v, beta, S)
    return total * S + _t_dot(static, k_out, y), (S, y)


def _chunk_transpose(static, dS, xs):
    """Reverse of `_chunk`, given what the outputs gave to y and S. Takes dS', returns dS and (dS', dr) with r = (I + A) y."""
    k_in, k_out, total, X, beta, dy, dstart = xs
    dr = dy + _dot(static, k_out, dS)
    dstart = total * dS + dstart
    if X is not None:
        dr = _t_dot(static, X, dr)
        dstart = dstart - _t_dot(static, k_in, beta * dr)
    return dstart, (dS, dr)


def _terms_cotangents(static, terms, v, beta, S, y, do, dS, dr):
    """Cotangents of (terms, v, beta) for a whole group, given what the two passes over its chunks left behind."""
    dot_t = functools.partial(_dot_t, static)
    dtotal = jnp.sum(S * dS, axis=-1, keepdims=True)
    if terms.total.shape[-2] == 1:
        dtotal = jnp.sum(dtotal, axis=-2, keepdims=True)
    dAqk, dq_in, dk_out = jnp.tril(dot_t(do, y)), dot_t(do, S), dot_t(y, dS)
    if terms.Akk is None:
        return Terms(None, dAqk, dq_in, jnp.zeros_like(terms.k_in), dk_out, dtotal), dr, None
    dA = -jnp.tril(dot_t(dr, y), -1)  # from y = (I + A)^-1 r: the inverse itself is never differentiated
    dv = beta * dr
    dbeta = jnp.sum(dr * (v - _dot(static, terms.k_in, S)), axis=-1, keepdims=True) + jnp.sum(dA * terms.Akk, axis=-1, keepdims=True)
    return Terms(beta * dA, dAqk, dq_in, -dot_t(dv, S), dk_out, dtotal), dv, dbeta


def _opaque(state):
    """The same state, which XLA cannot see to be zeros. A loop of one step is dissolved, and on a CPU the fusion for YNNPACK of
    x @ broadcast(0) beside a row sum reads uninitialised memory (jax 0.10 to 0.12; tests/ops/test_one_group.py).
    """
    return jax.lax.optimization_barrier(state)


def _share(x, like):
    """Repeat q or k heads (axis 2) for the value heads of `like`."""
    return jnp.repeat(x, like.shape[2] // x.shape[2], axis=2)


def _unshare(x, heads):
    """Transpose of `_share`: sum the value heads of each of `heads` q and k heads; a no-op if they agree."""
    n, B, HV = x.shape[:3]
    return x if HV == heads else jnp.sum(x.reshape(n, B, heads, -1, *x.shape[3:]), axis=3)


def _lower(static, like):
    return jnp.tril(jnp.ones((static.chunk_size,) * 2, like.dtype))


def _dot(static, a, b):
    return jnp.matmul(a, b, precision=static.precision)


def _dot_t(static, a, b):
    """a b^T."""
    return jnp.einsum("...ik,...jk->...ij", a, b, precision=static.precision)


def _t_dot(static, a, b):
    """a^T b."""
    return jnp.einsum("...ki,...kj->...ij", a, b, precision=static.precision)


def _to_groups(x, length, count):
    """[B, T, ...] -> [count, B, length, ...], padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, count * length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, length, *x.shape[2:]), 1, 0)


def _from_groups(x, T):
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :T]


def _split(x, C):
    """[B, n C, H, K] -> [n, B, H, C, K]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), (1, 3), (0, 2))


def _join(x):
    """[n, B, H, C, V] -> [B, n C, H, V]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])
