"""The two kernels that turn what the walks left into gradients, one program a chunk and head, and block of key channels.

    e = v - k_in S    y = T beta e    dv = beta dr    d(qk) = scale tril(do y^T)    dA = -stril(dr y^T)    dbeta = dr . e + (dA * kk) 1
    dq_in = scale do S^T    dk_in = -dv S^T    dk_out = y dS^T    dtotal = (S * dS) 1

A decay times its gradient is what each of the g it is made of gains: dg adds these up factor by factor, with no differences of sums.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.chunk import decays, level_factor
from pallas_kernels.gpu.plan import Plan, dot, load, log2_decay, once, pairs, square, store, terms, whole


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
        error = v[:, own].astype(jnp.float32) - dot(plan, once(plan, load(k_in)), load(states, slice(None), own))
        written = terms(plan, dot(plan, load(solve), weight * error))
        store(y, written, slice(None), own)
        dv[:, own] = (weight * d).astype(dv.dtype)
        dbeta = dbeta + jnp.sum(d * error, 1)
        return dot(plan, do[:, own], written, (1, 1), dqk), dot(plan, once(plan, gained), written, (1, 1), da), dbeta

    zeros = jnp.zeros((plan.C, plan.C), jnp.float32)
    products, d_a, d_beta = lax.fori_loop(0, plan.V // block, columns, (zeros, zeros, jnp.zeros((plan.C,), jnp.float32)))
    store(dqk, terms(plan, plan.scale * jnp.where(i >= j, products, 0.0)))
    store(da, terms(plan, jnp.where(i > j, -d_a, 0.0)))
    dbeta[...] = d_beta


def edges_kernel(plan: Plan, block: int, beta, do, y, dr, states, dends, dq_in, dk_in, dk_out, dtotal):
    """beta [C]; do [C, V]; in terms y, dr [C, V], states, dends [channels, V]; dq_in, dk_in, dk_out [C, channels]; dtotal [channels].
    `block` columns of values are taken at a time."""
    channels = states.shape[1]

    def columns(n, carry):
        own = pl.ds(n * block, block)
        start, end = load(states, slice(None), own), load(dends, slice(None), own)
        query, key, left, total = carry
        query = dot(plan, do[:, own], start, (1, 1), query)
        key = dot(plan, once(plan, load(dr, slice(None), own)), start, (1, 1), key)
        left = dot(plan, load(y, slice(None), own), end, (1, 1), left)
        return query, key, left, total + jnp.sum(whole(start) * whole(end), 1)

    zeros = jnp.zeros((plan.C, channels), jnp.float32)
    carry = zeros, zeros, zeros, jnp.zeros((channels,), jnp.float32)
    query, key, left, total = lax.fori_loop(0, plan.V // block, columns, carry)
    dq_in[...], dk_in[...], dk_out[...], dtotal[...] = plan.scale * query, -beta[...][:, None] * key, left, total


def channels_kernel(plan: Plan, masks, q, k, g, beta, dq_in, dk_in, dk_out, dtotal, dqk, da, dq, dk, dg, dbeta):
    """`masks` as in plan; q, k, g, dq_in, dk_in, dk_out, dq, dk, dg [C, block]; beta [C]; dtotal [block]; in terms dqk, da [C, C];
    dbeta [C] holds what comes through kk alone."""
    i, t = square(plan)
    queries, keys = q[...].astype(jnp.float32), k[...].astype(jnp.float32)
    logs = log2_decay(g[...])
    remains = jnp.exp2(jnp.sum(logs, 0))
    logs = terms(plan, logs)
    into, outof = decays(plan, masks, logs)
    weight = beta[...][:, None]
    d_queries, d_keys, left = dq_in[...] * into, dk_in[...] * into, dk_out[...] * outof
    d_logs = dot(plan, masks[plan.levels], queries * d_queries + keys * d_keys, (0, 0))
    d_logs = dot(plan, masks[plan.levels + 1], keys * left, (0, 0), d_logs) + (dtotal[...] * remains)[None, :]
    diagonal = jnp.sum(jnp.where(i == t, whole(load(dqk)), 0.0), 1)[:, None]
    d_queries, d_keys = d_queries + diagonal * keys, d_keys + left + diagonal * queries

    def level(n, carry):
        d_queries, d_keys, d_logs, d_weight = carry
        factor, chosen = level_factor(plan, masks, n, logs), pairs(plan, masks, n)
        rows, columns = queries * factor, keys * factor
        columns1 = once(plan, columns)
        by_key = tuple(x * chosen for x in load(da))
        d_columns = dot(plan, by_key, columns1)
        d_weight = d_weight + jnp.sum(columns * d_columns, 1)
        d_columns = dot(plan, once(plan, by_key), once(plan, weight * columns), (0, 0), weight * d_columns)
        by_query = tuple(x * chosen for x in load(dqk))
        d_columns = dot(plan, once(plan, by_query), once(plan, rows), (0, 0), d_columns)
        d_rows = dot(plan, by_query, columns1)
        d_logs = dot(plan, masks[n], once(plan, rows * d_rows + columns * d_columns), (0, 0), d_logs)
        return d_queries + factor * d_rows, d_keys + factor * d_columns, d_logs, d_weight

    d_queries, d_keys, d_logs, d_weight = lax.fori_loop(
        0, plan.levels, level, (d_queries, d_keys, d_logs, jnp.zeros((plan.C,), jnp.float32))
    )
    dq[...] = d_queries.astype(dq.dtype)
    dk[...] = d_keys.astype(dk.dtype)
    dg[...] = d_logs.astype(dg.dtype)
    dbeta[...] = d_weight
