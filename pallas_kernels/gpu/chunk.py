"""The kernel of what a chunk does to any state, one program a chunk and head: decayed products, inverse and decayed q and k.

Decays per channel weigh q_i . k_j by 2^(sum of g over j < t <= i). A binary hierarchy splits every weight at the middle of the smallest
power-of-two block that holds both tokens, so both factors are at most 1; every exponent is a sum of the log decays of the very tokens it
masks, a product with a 0/1 matrix, so nothing cancels and a decay of zero is exact. A level is then one exponential tile and two products.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.plan import Plan, Terms, dot, log2_decay, once, pairs, square, store, terms, whole


def decays(plan: Plan, masks, g: Terms) -> tuple[jax.Array, jax.Array]:
    """[C, K] decays from the chunk's start to each token, it included, and from each token, excluded, to the chunk's end."""
    return level_factor(plan, masks, plan.levels, g), level_factor(plan, masks, plan.levels + 1, g)


def level_factor(plan: Plan, masks, level, g: Terms) -> jax.Array:
    """[C, K]: what tokens decay by at a level, see `plan.masks`."""
    return jnp.exp2(dot(plan, masks[level], g))


def inverse(plan: Plan, masks, a: jax.Array) -> jax.Array:
    """Strictly lower A [C, C] float32 -> (I + A)^-1 float32.

    Block doubling: with X the inverse of the s x s diagonal blocks and L the blocks that join them in pairs, X - X L X is the inverse of
    the 2s x 2s ones. No power of A is ever formed, so correlated keys do not blow it up. For bfloat16 inputs, after one-pass products one
    Newton step X + X (I - X - A X), its residual with A in two terms, leaves the square of their error.
    """
    i, j = square(plan)
    eye = jnp.where(i == j, jnp.float32(1), jnp.float32(0))

    def level(n, x):
        joined, x16 = once(plan, a * pairs(plan, masks, n)), once(plan, x)
        return x - dot(plan, once(plan, dot(plan, x16, joined)), x16)

    x = lax.fori_loop(1, plan.levels, level, eye - a * pairs(plan, masks, 0))
    if plan.terms == 3:
        return x
    x16 = once(plan, x)
    x32 = whole(x16)
    residual = eye - x32 - dot(plan, a, x16)
    return x32 + dot(plan, x16, once(plan, residual))


def decayed(plan: Plan, own, masks, q, k, g, q_in, k_in, k_out, total) -> tuple[jax.Array, jax.Array, Terms]:
    """Of the channels `own`: stores q and k decayed from the chunk's start, k to its end, the state's decay; returns q, k, log decays."""
    queries, keys, logs = q[:, own].astype(jnp.float32), k[:, own].astype(jnp.float32), log2_decay(g[:, own])
    total[own] = jnp.exp2(jnp.sum(logs, 0))
    logs = terms(plan, logs)
    into, outof = decays(plan, masks, logs)
    for ref, x in ((q_in, queries * into), (k_in, keys * into), (k_out, keys * outof)):
        store(ref, terms(plan, x), slice(None), own)
    return queries, keys, logs


def decay_kernel(plan: Plan, block: int, masks, q, k, g, q_in, k_in, k_out, total):
    """`masks` as in plan; q, k, g [C, K] -> in terms q_in, k_in, k_out [C, K]; total [K]. `block` channels are taken at a time."""

    def channels(n, _):
        decayed(plan, pl.ds(n * block, block), masks, q, k, g, q_in, k_in, k_out, total)
        return _

    lax.fori_loop(0, plan.K // block, channels, 0)


def chunk_kernel(plan: Plan, block: int, masks, q, k, g, beta, q_in, k_in, k_out, total, qk, solve):
    """As `decay_kernel`, and with beta [C] in terms the products q . k and the inverse [C, C]."""
    i, j = square(plan)

    def channels(n, products):
        queries, keys, logs = decayed(plan, pl.ds(n * block, block), masks, q, k, g, q_in, k_in, k_out, total)

        def level(m, products):
            factor, chosen = level_factor(plan, masks, m, logs), pairs(plan, masks, m).astype(jnp.float32)
            rows, columns = once(plan, queries * factor), terms(plan, keys * factor)
            found = [dot(plan, x, columns, (1, 1)) for x in (rows, columns)]
            return [x + chosen * y for x, y in zip(products, found, strict=True)]

        diagonal = jnp.where(i == j, jnp.sum(queries * keys, 1)[:, None], 0.0)  # no decay between a token and itself
        return lax.fori_loop(0, plan.levels, level, [products[0] + diagonal, products[1]])

    by_query, by_key = lax.fori_loop(0, plan.K // block, channels, [jnp.zeros((plan.C, plan.C), jnp.float32)] * 2)
    store(qk, terms(plan, jnp.where(i >= j, by_query, 0.0)))
    store(solve, terms(plan, inverse(plan, masks, jnp.where(i > j, by_key * beta[...][:, None], 0.0))))
