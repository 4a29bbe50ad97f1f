"""One pack of heads of one chunk: from loaded inputs to operands and scores, and the order in which packs are traced."""

from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tpu import decay as D
from pallas_kernels.tpu.plan import Plan, exp2, log2_decay, rows, softplus, sums


class HeadDecays(NamedTuple):
    """Decays "head", base 2 logs and products, [C, heads] for a grid step or [C, 1] for one head, float32."""

    log: jax.Array
    prefix: jax.Array  # product of the decays up to and including this token
    suffix: jax.Array  # product of the decays after this token


class Logits(NamedTuple):
    """Logits of one head's decays: g = -rate softplus(x + bias), or bound sigmoid(rate (x + bias))."""

    x: jax.Array  # [C, K]
    rate: jax.Array  # [1, K]
    bias: jax.Array  # [1, K]


class Cut(NamedTuple):
    """Sequence starts inside the chunk, shared by all heads: decays [C, 1] of 0 or 1, and their matrix in lane form [C, N]."""

    decays: HeadDecays
    matrix: jax.Array


class Prepared(NamedTuple):
    """A pack as its scores need it."""

    operands: list[D.Operands]
    q: list[jax.Array]  # undecayed q and k: kinds "none" and "head"
    k: list[jax.Array]
    matrix: jax.Array | None  # decay matrix [C, N] of kind "head"
    diagonal: list[jax.Array]  # q . k of each token [C, 1]: decays per channel


def head_decays(plan: Plan, constant, g: jax.Array) -> HeadDecays:
    """g [C, heads] float32, natural log."""
    g = log2_decay(g)
    prefix, suffix = (exp2(sums(plan, constant[n][...], constant[n + "_t"][...], g)) for n in ("prefix", "suffix"))
    return HeadDecays(g, prefix, suffix)


def sequence_cut(plan: Plan, constant, reset: jax.Array) -> Cut:
    """reset [C, 1]: 0, or -inf where a sequence starts."""
    decays = head_decays(plan, constant, reset)
    return Cut(decays, head_matrix(plan, constant, [decays.log] * plan.pack))


def log_decay(plan: Plan, g: jax.Array | Logits) -> jax.Array:
    """[C, K] float32, natural log."""
    if plan.gate is None:
        return g
    x = g.x + g.bias
    return plan.gate * jax.nn.sigmoid(g.rate * x) if plan.gate else -g.rate * softplus(x)


def inverse_norm(x: jax.Array) -> jax.Array:
    """[C, K] -> [C, 1]: 1 / sqrt(sum x^2 + 1e-6)."""
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def prepare(plan: Plan, constant, cut: Cut | None, q: list[jax.Array], k: list[jax.Array], g) -> Prepared:
    """q, k: lists of [C, K], float32 where decays are per channel; g: list of [C, K] natural log decays, Logits, HeadDecays or None.

    Differentiable in everything for decays per channel, in g for others."""
    if plan.channel:
        local = constant["local"][...], constant["local_t"][...]
        operands = [
            D.channel_operands(plan, local, qi, ki, log2_decay(log_decay(plan, gi)), cut) for qi, ki, gi in zip(q, k, g, strict=True)
        ]
        return Prepared(operands, [], [], None, [jnp.sum(qi * ki, -1, keepdims=True) for qi, ki in zip(q, k, strict=True)])
    if plan.decay == "none":
        return Prepared([D.scalar_operands(plan, qi, ki, None, None) for qi, ki in zip(q, k, strict=True)], q, k, None, [])
    operands = [D.scalar_operands(plan, qi, ki, gi.prefix, gi.suffix) for qi, ki, gi in zip(q, k, g, strict=True)]
    return Prepared(operands, q, k, head_matrix(plan, constant, [gi.log for gi in g]), [])


def head_matrix(plan: Plan, constant, log: list[jax.Array]) -> jax.Array:
    return D.head_matrix(plan, (constant["prefix"][...], constant["prefix_t"][...]), log)


def scores(plan: Plan, ready: Prepared, cut: Cut | None, kk: bool) -> D.Scores:
    if plan.channel:
        out = D.channel_scores(plan, ready.operands, kk)
        return out if cut is None else D.Scores(out.qk * rows([cut.matrix] * plan.pack), out.kk * cut.matrix if kk else None)
    return D.scalar_scores(plan, ready.q, ready.k, ready.matrix, kk)


def interleave(tasks: list[Generator]) -> list:
    """Runs the generators to their ends, one step of each in turn; returns their results.

    The instruction scheduler moves instructions only a little, so the order in which a kernel is traced decides what overlaps: tracing the
    packs in step puts one pack's matmul latency in the shadow of the others' work.
    """
    results, running = [None] * len(tasks), list(range(len(tasks)))
    while running:
        for i in list(running):
            try:
                next(tasks[i])
            except StopIteration as end:
                results[i] = end.value
                running.remove(i)
    return results


def times_diagonal(plan: Plan, ready: Prepared, x: jax.Array) -> jax.Array:
    """The diagonal of q . k times x [N, V], where the scores do not hold it; else zero."""
    if not ready.diagonal:
        return 0.0
    return rows([d * x[p * plan.C : (p + 1) * plan.C].astype(jnp.float32) for p, d in enumerate(ready.diagonal)])
