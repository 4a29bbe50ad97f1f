"""The backward kernel: the forward's grid with chunks in reverse; the gradient of the state is carried in VMEM.

With n = 1 / |k| where keys are normalised (else 1), z = n y what a token writes, w = beta n dr and everything but T recomputed from the
inputs and the saved chunk-start state S (solve form, no w or u matrices):

    z = T beta n (v - n k~ S)         dz = (qk)^T do + k^ dS       dr = T^T dz
    dv = w                            dbeta = dr . z / beta         d(qk) = tril(do z^T)    d(kk) = -stril(n w z^T)
    dq~ = do S^T   dk~ = -n w S^T     dk^ = z dS^T                  dS <- decay dS + q~^T do - k~^T n w

(states are stored transposed, [V, K]; do stands for the gradient times the output's scale and 1 / |q|). The gradients of the elementwise
operands then go through `jax.vjp` of `prepare` where decays are per channel; per head they are written out.
"""

import dataclasses
import functools
from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu import decay as D
from pallas_kernels.tpu.forward import Factors, Step, betas, call, columns_by_step, decayed, factors, load_step, pack_inputs, written
from pallas_kernels.tpu.pack import HeadDecays, Prepared, head_decays, head_matrix, interleave, prepare, scores, times_diagonal
from pallas_kernels.tpu.plan import STRIP, Plan, causal_masks, dot, round_once, rows, saved, split_rows, to_block, to_lanes


class Gradients(NamedTuple):
    """Of one pack: lists over its heads."""

    q: list[jax.Array]
    k: list[jax.Array]
    v: list[jax.Array]
    g: list
    beta: list[jax.Array]  # [C, 1]; empty without the delta rule


class Values(NamedTuple):
    """A pack's written values and the gradients that flow into the scores: [N, V], and [N or 2N, N] in block form."""

    z: jax.Array
    do: jax.Array
    w: list[jax.Array] | None  # n w
    d_scores: jax.Array


class FactorGradients(NamedTuple):
    """Of one pack: columns [C, 1] by head."""

    beta: list[jax.Array]
    key: list[jax.Array]  # n times the gradient of n


def values(plan: Plan, refs, step: Step, do, ready: Prepared, score: D.Scores, factor: list[Factors], heads: list[int]) -> Generator:
    """Returns (Values, FactorGradients, gradients of v)."""
    C = plan.C
    v = [step.v[h] for h in heads]
    beta = betas(plan, refs, step, heads)
    solve, read = None, [None] * len(heads)
    if plan.delta:
        solve = to_block(plan, saved(plan, refs["inverse"][0, 0, heads[0] // plan.pack]), refs["diagonal"][...])
        state = [saved(plan, refs["states"][0, 0, h]) for h in heads]  # as exact as in the forward: dbeta is of what v - k~ S leaves
        read = [dot(plan, rows(op.k_state), s, (1, 1)) for s, op in zip(state, ready.operands, strict=True)]
        yield
    z = written(plan, v, read, ready, factor, solve)
    do = rows([f.query * do[h].astype(jnp.float32) for h, f in zip(heads, factor, strict=True)])
    carried = [
        decayed(dot(plan, rows(op.tail), refs["dinitial"][0, h], (1, 1)), op.outof) for op, h in zip(ready.operands, heads, strict=True)
    ]
    dz = dot(plan, score.qk, do, (0, 0)) + times_diagonal(plan, ready, do) + rows(carried)
    yield
    block, _ = causal_masks(plan)
    tall = None if step.cut is None else rows([step.cut.matrix] * plan.pack)
    if not plan.delta:
        d = jnp.where(block, dot(plan, do, z, (1, 1)), 0.0)
        dz = split_rows(dz, C)
        dv = [x * f.key for x, f in zip(dz, factor, strict=True)] if plan.normalize else dz
        d_key = column_sums([x * y for x, y in zip(dz, split_rows(z, C), strict=True)]) if plan.normalize else []
        return Values(z, do, None, d if tall is None else d * tall), FactorGradients([], d_key), dv
    dr = dot(plan, solve, dz, (0, 0))
    yield
    error = column_sums(split_rows(dr * z, C))
    dv = [f.write * x for f, x in zip(factor, split_rows(dr, C), strict=True)]
    d_beta, d_key, w = [e / b for e, b in zip(error, beta, strict=True)], [], dv
    if plan.normalize:
        w = [f.key * x for f, x in zip(factor, dv, strict=True)]
        d_key = [2.0 * e - s for e, s in zip(error, column_sums([x * y for x, y in zip(dv, v, strict=True)]), strict=True)]
    d = dot(plan, round_once(plan, jnp.concatenate([do, *w], 0)), z, (1, 1))
    row, col = (jax.lax.broadcasted_iota(jnp.int32, (plan.N, plan.N), d) for d in (0, 1))
    d = jnp.concatenate([jnp.where(block, d[: plan.N], 0.0), jnp.where(block & (row > col), -d[plan.N :], 0.0)], 0)
    if tall is not None:
        d = d * jnp.concatenate([tall, tall], 0)
    return Values(z, do, w, d), FactorGradients(d_beta, d_key), dv


def column_sums(x: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(xi, -1, keepdims=True) for xi in x]


def state_gradients(plan: Plan, refs, ready: Prepared, val: Values, heads: list[int]) -> list[D.Operands]:
    """Gradients of the operands that meet the state, before `into` and `outof`; moves the state's gradient to the chunk's start."""
    C, out, strip = plan.C, [], STRIP if plan.channel else plan.C
    for p, (h, op) in enumerate(zip(heads, ready.operands, strict=True)):
        own = slice(p * C, (p + 1) * C)
        state, d_state = saved(plan, refs["states"][0, 0, h]), refs["dinitial"][0, h]
        left = jnp.concatenate([val.do[own], -val.w[p]], 0) if plan.delta else val.do[own]
        d_rows = split_rows(dot(plan, left, state), strip)
        half = len(d_rows) // (1 + plan.delta)
        d_tail = split_rows(dot(plan, val.z[own], d_state), strip)
        d_total = None
        if op.total is not None:
            whole = sum(t.astype(jnp.float32) for t in state)
            d_total = jnp.sum(d_state * whole, 0, keepdims=True)
            if op.total.shape[1] == 1:
                d_total = jnp.sum(d_total, 1, keepdims=True)
        right = rows(op.q_state + op.k_state if plan.delta else op.q_state)
        into = op.into if op.into is None or not plan.delta else jnp.concatenate([op.into] * 2, 0)
        refs["dinitial"][0, h] = decayed(d_state, op.total) + dot(plan, decayed(left, into), right, (0, 0))
        out.append(op._replace(q_state=d_rows[:half], k_state=d_rows[half:] if plan.delta else None, tail=d_tail, total=d_total))
    return out


def channel_pull(plan: Plan, ready: Prepared, pull, val: Values, d_state: list[D.Operands]) -> tuple[list, list, list]:
    """Gradients of q, k and g of a pack under decays per channel."""
    d_scores = D.channel_score_gradients(plan, ready.operands, val.d_scores)
    d_operands = [
        s._replace(q_row=o.q_row, k_row=o.k_row, columns=o.columns, levels=o.levels) for s, o in zip(d_state, d_scores, strict=True)
    ]
    d_diagonal = split_rows(jnp.sum(val.do * val.z, -1, keepdims=True), plan.C)
    return pull(Prepared(d_operands, [], [], None, d_diagonal))


def scalar_pull(plan: Plan, refs, ready: Prepared, raw: D.Scores, g, val: Values, d_state: list[D.Operands]) -> tuple[list, list, list]:
    """Gradients of q, k and g of a pack for decays "none" and "head"; d_scores is already masked."""
    N, C, P, d = plan.N, plan.C, plan.pack, val.d_scores
    d_matrix = None
    if ready.matrix is not None:
        tall = rows([ready.matrix] * P)
        by_block = d[:N] * raw.qk
        d_matrix = to_lanes(plan, [by_block[p * C : (p + 1) * C] for p in range(P)])
        if plan.delta:
            d_matrix += to_lanes(plan, [d[N + p * C : N + (p + 1) * C] for p in range(P)]) * raw.kk
            tall = jnp.concatenate([tall, tall], 0)
        d = d * tall
    left = rows(ready.q + ready.k if plan.delta else ready.q)
    d_rows, d_keys = D.score_gradients(plan, left, rows(ready.k), d)
    dq, dk, dg = split_rows(d_rows[:N], C), split_rows(d_keys, C), []
    if plan.delta:
        dk = [a + b for a, b in zip(dk, split_rows(d_rows[N:], C), strict=True)]
    last = jax.lax.broadcasted_iota(jnp.int32, (C, 1), 0) == C - 1
    for p, (op, s) in enumerate(zip(ready.operands, d_state, strict=True)):
        dq[p] += decayed(s.q_state[0], op.into)
        dk[p] += decayed(s.tail[0], op.outof)
        if plan.delta:
            dk[p] += decayed(s.k_state[0], op.into)
        if op.into is not None:
            d_into = ready.q[p].astype(jnp.float32) * s.q_state[0]
            if plan.delta:
                d_into += ready.k[p].astype(jnp.float32) * s.k_state[0]
            d_into, d_outof = column_sums([d_into, ready.k[p].astype(jnp.float32) * s.tail[0]])
            dg.append(HeadDecays(None, jnp.where(last, d_into + s.total, d_into), d_outof))
    if d_matrix is not None:
        _, pull = jax.vjp(functools.partial(head_matrix, plan, refs), [x.log for x in g])
        dg = [x._replace(log=log) for x, log in zip(dg, pull(d_matrix)[0], strict=True)]
    return dq, dk, dg


def through_norms(plan: Plan, step: Step, heads: list[int], dq: list, dk: list, d_key: list) -> tuple[list, list]:
    """Adds the gradients that reach q and k through 1 / |q| and 1 / |k|: d(1 / |x|) = -x / |x|^3; of 1 / |q| it is q . dq |q|."""
    queries, keys = [], []
    for p, h in enumerate(heads):
        q, k, a, n = (x[h // plan.group] for x in (step.q, step.k, step.q_norm, step.k_norm))
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        queries.append(dq[p] - q * (a * a * column_sums([q * dq[p]])[0]))
        keys.append(dk[p] - k * (n * n * d_key[p]))
    return queries, keys


def backward_pack(plan: Plan, refs, step: Step, do, heads: list[int]) -> Generator[None, None, Gradients]:
    q, k, g = pack_inputs(plan, refs, step, heads)
    prepared = functools.partial(prepare, plan, refs, step.cut)
    ready, pull = jax.vjp(prepared, q, k, g) if plan.channel else (prepared(q, k, g), None)
    yield
    raw = None
    if plan.channel:
        score = scores(plan, ready, step.cut, False)
    else:
        raw = D.raw_scores(plan, ready.q, ready.k, ready.k, plan.delta and plan.decay == "head")
        tall = 1.0 if ready.matrix is None else rows([ready.matrix] * plan.pack)
        score = D.mask_scores(plan, D.Scores(raw.qk * tall, None))
    yield
    factor = [factors(plan, step, h, b) for h, b in zip(heads, betas(plan, refs, step, heads), strict=True)]
    val, d_factor, dv = yield from values(plan, refs, step, do, ready, score, factor, heads)
    yield
    d_state = state_gradients(plan, refs, ready, val, heads)
    yield
    dq, dk, dg = channel_pull(plan, ready, pull, val, d_state) if plan.channel else scalar_pull(plan, refs, ready, raw, g, val, d_state)
    if plan.normalize:
        dq, dk = through_norms(plan, step, heads, dq, dk, d_factor.key)
    return Gradients(dq, dk, dv, dg, d_factor.beta)


def lanes(columns: list[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Columns [C, 1] -> [C, heads]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    out = jnp.zeros(shape, jnp.float32)
    for h, column in enumerate(columns):
        out = jnp.where(lane == h, column, out)
    return out


def store_heads(plan: Plan, ref, x: list[jax.Array]) -> None:
    """Sums value heads into the heads of `ref` [1, C, heads, width] and turns them tokens-first."""
    group = len(x) // ref.shape[2]
    x = [sum(x[i + 1 : i + group], x[i]).astype(ref.dtype) for i in range(0, len(x), group)]
    ref[0] = jnp.swapaxes(jnp.stack(x), 0, 1)


def backward_kernel(plan: Plan, names: tuple[str, ...], *refs):
    refs = dict(zip(names, refs, strict=True))
    carried = refs["dinitial"]

    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = refs["dfinal"][...]
        for name in ("drate", "dbias") if plan.gate is not None else ():
            refs[name][...] = jnp.zeros_like(refs[name])

    step = load_step(plan, refs)
    do = jnp.swapaxes(refs["do"][0], 0, 1)
    packs = [backward_pack(plan, refs, step, do, list(range(h, h + plan.pack))) for h in range(0, plan.heads, plan.pack)]
    packs = interleave(packs)
    q, k, v, g, beta = ([x for pack in packs for x in pack[field]] for field in range(5))
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        store_heads(plan, refs[name], x)
    shape = (plan.C, plan.heads)
    if plan.delta:
        refs["dbeta"][0, 0] = lanes(beta, shape)
    if plan.gate is not None:
        refs["drate"][0] += rows([x.rate for x in g])
        refs["dbias"][0] += rows([x.bias for x in g])
        g = [x.x for x in g]
    if step.g is not None:
        store_heads(plan, refs["dg"], g)
    elif plan.decay == "head":
        _, pull = jax.vjp(functools.partial(head_decays, plan, refs), refs["g"][0, 0].astype(jnp.float32))
        (dg,) = pull(HeadDecays(*(lanes(list(columns), shape) for columns in zip(*g, strict=True))))
        refs["dg"][0, 0] = dg


def backward(plan: Plan, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """inputs: those of `forward` without initial, its states and inverse, do like o and dfinal like final.

    Returns dq, dk, dv, dinitial and by kind dg, dbeta, and drate, dbias [B, HV, K] float32.
    """
    plan = dataclasses.replace(plan, heads=plan.backward_heads)
    inputs = columns_by_step(plan, inputs)
    B, T, HV, _ = inputs["v"].shape
    N, S = T // plan.C, HV // plan.heads
    outputs = {"d" + n: jax.ShapeDtypeStruct(inputs[n].shape, inputs[n].dtype) for n in "qkv"}
    if plan.share > 1:  # summed over value heads afterwards, and rounded then
        outputs |= {"d" + n: jax.ShapeDtypeStruct(inputs[n].shape, jnp.float32) for n in "qk"}
    outputs |= {"d" + n: jax.ShapeDtypeStruct(inputs[n].shape, inputs[n].dtype) for n in ("g", "beta") if n in inputs}
    outputs |= {"d" + n: jax.ShapeDtypeStruct((B, *inputs[n].shape), jnp.float32) for n in ("rate", "bias") if n in inputs}
    outputs["dinitial"] = jax.ShapeDtypeStruct(inputs["dfinal"].shape, jnp.float32)
    out = call(plan, backward_kernel, "backward", inputs, outputs, (B, S, N), lambda t: N - 1 - t)
    columns = ("dbeta",) if plan.channel else ("dbeta", "dg")
    return {n: jnp.swapaxes(x, 1, 2).reshape(B, T, HV) if n in columns else x for n, x in out.items()}
