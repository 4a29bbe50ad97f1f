"""The two kernels that turn what the walks left into gradients, one program a chunk and head, and block of key channels.

    e = v - k_in S    y = T beta e    dv = beta dr    d(qk) = scale tril(do y^T)    dA = -stril(dr y^T)    dbeta = dr . e + (dA * kk) 1
    dq_in = scale do S^T    dk_in = -dv S^T    dk_out = y dS^T    dtotal = (S * dS) 1

A decay times its gradient is what each of the g it is made of gains: dg adds these up factor by factor, with no differences of sums.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.chunk import decays, level_factor
from pallas_kernels.gpu.plan import Plan, dot, load, log2_decay, once, pairs_of_level, square, store, terms, whole


def values_kernel(plan: Plan, block: int, v, do, beta, k_in, solve, states, dr, dv, y, dqk, da, dbeta):
    """v, do, dv [C, V]; beta, dbeta [C]; in terms k_in [C, K], solve [C, C], states [K, V], dr, y [C, V], dqk, da [C, C]. dbeta lacks what
    comes through kk. `block` columns of values are taken at a time."""
    i, j = square(plan)
    weight = beta[...][:, None]

    def columns(n, carry):
        dqk, da, dbeta = carry
        own = pl.ds(n * block, block)
        gained = load(dr, slice(None), own)
        d = whole(gained)
        error = v[:, own].astype(jnp.float32) - dot(plan, load(k_in), load(states, slice(None), own))
        written = terms(plan, dot(plan, load(solve), weight * error))
        store(y, written, slice(None), own)
        dv[:, own] = (weight * d).astype(dv.dtype)
        dbeta = dbeta + jnp.sum(d * error, 1)
        return dot(plan, do[:, own], written, (1, 1), dqk), dot(plan, gained, written, (1, 1), da), dbeta

    zeros = jnp.zeros((plan.C, plan.C), jnp.float32)
    products, d_a, d_beta = lax.fori_loop(0, plan.V // block, columns, (zeros, zeros, jnp.zeros((plan.C,), jnp.float32)))
    store(dqk, terms(plan, plan.scale * jnp.where(i >= j, products, 0.0)))
    store(da, terms(plan, jnp.where(i > j, -d_a, 0.0)))
    dbeta[...] = d_beta


def state_gradients(plan: Plan, block: int, weight, do, y, dr, states, dends):
    """Gradients of q_in, k_in, k_out and of the state's decay, which is the same in every row: [C, block]; `weight` is beta [C, 1]."""

    def columns(n, carry):
        own = pl.ds(n * block, block)
        start, end = load(states, slice(None), own), load(dends, slice(None), own)
        d_query, d_key, left, d_total = carry
        d_query = dot(plan, do[:, own], start, (1, 1), d_query)
        d_key = dot(plan, load(dr, slice(None), own), start, (1, 1), d_key)
        left = dot(plan, load(y, slice(None), own), end, (1, 1), left)
        return d_query, d_key, left, d_total + jnp.sum(whole(start) * whole(end), 1)

    zeros = jnp.zeros((plan.C, states.shape[1]), jnp.float32)
    carry = zeros, zeros, zeros, jnp.zeros(states.shape[1:2], jnp.float32)
    d_query, d_key, left, d_total = lax.fori_loop(0, states.shape[2] // block, columns, carry)
    return plan.scale * d_query, -weight * d_key, left, d_total


def channels_kernel(plan: Plan, spans, q, k, g, beta, do, y, dr, states, dends, dqk, da, dq, dk, dg, dbeta):
    """`spans` as in plan; q, k, g, dq, dk, dg [C, block]; beta [C]; do [C, V]; in terms y, dr [C, V], states, dends [block, V], dqk,
    da [C, C]; dbeta [C] holds what comes through kk alone."""
    i, t = square(plan)
    queries, keys = q[...].astype(jnp.float32), k[...].astype(jnp.float32)
    logs = log2_decay(g[...])
    remains = jnp.exp2(jnp.sum(logs, 0))
    logs = terms(plan, logs)
    into, outof = decays(plan, spans, logs)
    weight = beta[...][:, None]
    d_queries, d_keys, left, d_total = state_gradients(plan, min(64, plan.V), weight, do, y, dr, states, dends)
    d_queries, d_keys, left = d_queries * into, d_keys * into, left * outof
    d_logs = dot(plan, spans[plan.levels], queries * d_queries + keys * d_keys, (0, 0))
    d_logs = dot(plan, spans[plan.levels + 1], keys * left, (0, 0), d_logs) + (d_total * remains)[None, :]
    by_query, by_key = load(dqk), load(da)
    diagonal = jnp.sum(jnp.where(i == t, whole(by_query), 0.0), 1)[:, None]
    d_queries, d_keys = d_queries + diagonal * keys, d_keys + left + diagonal * queries

    def level(n, carry):
        d_queries, d_keys, d_logs, d_weight = carry
        factor, pairs = level_factor(plan, spans, n, logs), pairs_of_level(plan, n)
        rows, columns = queries * factor, keys * factor
        by_q, by_k = ([jnp.where(pairs, x, jnp.zeros_like(x)) for x in xs] for xs in (by_query, by_key))
        by_q, by_k, rows1, columns1 = tuple(by_q), tuple(by_k), once(plan, rows), once(plan, columns)
        d_rows, d_columns = dot(plan, by_q, columns1), dot(plan, by_k, columns1)
        d_weight = d_weight + jnp.sum(columns * d_columns, 1)
        d_columns = dot(plan, once(plan, by_q), rows1, (0, 0), weight * d_columns)
        d_columns = dot(plan, once(plan, by_k), once(plan, weight * columns), (0, 0), d_columns)
        d_logs = dot(plan, spans[n], rows * d_rows + columns * d_columns, (0, 0), d_logs)
        return d_queries + factor * d_rows, d_keys + factor * d_columns, d_logs, d_weight

    d_queries, d_keys, d_logs, d_weight = lax.fori_loop(
        0, plan.levels, level, (d_queries, d_keys, d_logs, jnp.zeros((plan.C,), jnp.float32))
    )
    dq[...] = d_queries.astype(dq.dtype)
    dk[...] = d_keys.astype(dk.dtype)
    dg[...] = d_logs.astype(dg.dtype)
    dbeta[...] = d_weight
