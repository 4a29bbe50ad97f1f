"""The backward kernel: the forward's grid with chunks in reverse; the gradient of the state is carried in VMEM.

With w = beta dr and everything but T recomputed from the inputs and the saved chunk-start state S (solve form, no w or u matrices):

    y = T beta (v - k~ S)             dy = (qk)^T do + k^ dS       dr = T^T dy
    dv = w                            dbeta = dr . y / beta         d(qk) = tril(do y^T)    d(kk) = -stril(w y^T)
    dq~ = do S^T   dk~ = -w S^T       dk^ = y dS^T                  dS <- decay dS + q~^T do - k~^T w

(states are stored transposed, [V, K]). The gradients of the elementwise operands then go through `jax.vjp` of `prepare`.
"""

import functools
from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu import decay as D
from pallas_kernels.tpu.forward import Step, call, load_step, pack_inputs
from pallas_kernels.tpu.pack import HeadDecays, Prepared, head_decays, interleave, prepare, rows, scores, times_diagonal
from pallas_kernels.tpu.plan import STRIP, TINY, Plan, causal_masks, dot, split_rows, to_block, to_lanes


class Gradients(NamedTuple):
    """Of one pack: lists over its heads."""

    q: list[jax.Array]
    k: list[jax.Array]
    v: list[jax.Array]
    g: list
    beta: list[jax.Array]  # [C, 1]; empty without the delta rule


class Values(NamedTuple):
    """A pack's written values and the gradients that flow into the scores: [N, V], and [N or 2N, N] in block form."""

    y: jax.Array
    do: jax.Array
    w: jax.Array | None
    d_scores: jax.Array


def scalar_score_gradients(plan: Plan, ready: Prepared, raw: D.Scores, d: jax.Array) -> tuple[jax.Array | None, list, list]:
    """(gradient of the decay matrix, of q, of k) for decays "none" and "head"; d is already masked."""
    N, C, P = plan.N, plan.C, plan.pack
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
    dq, dk = split_rows(d_rows[:N], C), split_rows(d_keys, C)
    if plan.delta:
        dk = [a + b for a, b in zip(dk, split_rows(d_rows[N:], C), strict=True)]
    return d_matrix, dq, dk


def values(plan: Plan, refs, step: Step, do, ready: Prepared, score: D.Scores, heads: list[int]) -> Generator:
    """Returns (Values, gradients of beta)."""
    C = plan.C
    v = [step.v[h] for h in heads]
    solve, beta = None, None
    if plan.delta:
        state = [refs["states"][0, 0, h] for h in heads]
        beta = [step.beta[:, h : h + 1] for h in heads]
        beta = [jnp.where(b == 0.0, TINY, b) for b in beta]
        solve = to_block(plan, refs["inverse"][0, 0, heads[0] // plan.pack], refs["diagonal"][...])
        read = [dot(plan, rows(op.k_state), s, (1, 1)) for op, s in zip(ready.operands, state, strict=True)]
        yield
        y = dot(plan, solve, rows([b * (vi.astype(jnp.float32) - x) for b, vi, x in zip(beta, v, read, strict=True)]))
    else:
        y = rows(v)
    do = rows([do[h].astype(jnp.float32) * plan.scale for h in heads])
    carried = [dot(plan, rows(op.tail), refs["dinitial"][0, h], (1, 1)) for op, h in zip(ready.operands, heads, strict=True)]
    dy = dot(plan, score.qk, do, (0, 0)) + times_diagonal(plan, ready, do) + rows(carried)
    yield
    block, _ = causal_masks(plan)
    tall = None if step.cut is None else rows([step.cut.matrix] * plan.pack)
    if not plan.delta:
        d = jnp.where(block, dot(plan, do, y, (1, 1)), 0.0)
        return Values(y, do, None, d if tall is None else d * tall), [], split_rows(dy, C)
    dr = dot(plan, solve, dy, (0, 0))
    yield
    row, col = (jax.lax.broadcasted_iota(jnp.int32, (plan.N, plan.N), d) for d in (0, 1))
    error = dr * y
    dbeta = [jnp.sum(error[p * C : (p + 1) * C], -1, keepdims=True) / b for p, b in enumerate(beta)]
    w = rows([b * dr[p * C : (p + 1) * C] for p, b in enumerate(beta)])
    d = dot(plan, jnp.concatenate([do, w], 0), y, (1, 1))
    d = jnp.concatenate([jnp.where(block, d[: plan.N], 0.0), jnp.where(block & (row > col), -d[plan.N :], 0.0)], 0)
    if tall is not None:
        d = d * jnp.concatenate([tall, tall], 0)
    return Values(y, do, w, d), dbeta, split_rows(w, C)


def state_gradients(plan: Plan, refs, ready: Prepared, val: Values, heads: list[int]) -> list[D.Operands]:
    """Gradients of the operands that meet the state; moves the state's gradient to the chunk's start."""
    C, out = plan.C, []
    for p, (h, op) in enumerate(zip(heads, ready.operands, strict=True)):
        own = slice(p * C, (p + 1) * C)
        state, d_state = refs["states"][0, 0, h], refs["dinitial"][0, h]
        left = jnp.concatenate([val.do[own], -val.w[own]], 0) if plan.delta else val.do[own]
        d_rows = split_rows(dot(plan, left, state), plan.C if not op.q_row else STRIP)
        half = len(d_rows) // (1 + plan.delta)
        d_tail = split_rows(dot(plan, val.y[own], d_state), plan.C if not op.q_row else STRIP)
        d_total = None
        if op.total is not None:
            d_total = jnp.sum(d_state * state.astype(jnp.float32), 0, keepdims=True)
            if op.total.shape[1] == 1:
                d_total = jnp.sum(d_total, 1, keepdims=True)
        right = rows(op.q_state + op.k_state if plan.delta else op.q_state)
        update = dot(plan, left, right, (0, 0))
        refs["dinitial"][0, h] = (d_state if op.total is None else d_state * op.total) + update
        out.append(op._replace(q_state=d_rows[:half], k_state=d_rows[half:] if plan.delta else None, tail=d_tail, total=d_total))
    return out


def backward_pack(plan: Plan, refs, step: Step, do, heads: list[int]) -> Generator[None, None, Gradients]:
    q, k, g = pack_inputs(plan, refs, step, heads)
    q, k = ([x.astype(jnp.float32) for x in xs] for xs in (q, k))
    ready, pull = jax.vjp(functools.partial(prepare, plan, refs, step.cut), q, k, g)
    yield
    raw = None
    if plan.channel:
        score = scores(plan, ready, step.cut, False)
    else:
        raw = D.raw_scores(plan, ready.q, ready.k, plan.delta and plan.decay == "head")
        tall = 1.0 if ready.matrix is None else rows([ready.matrix] * plan.pack)
        score = D.mask_scores(plan, D.Scores(raw.qk * tall, None))
    yield
    val, dbeta, dv = yield from values(plan, refs, step, do, ready, score, heads)
    yield
    d_state_operands = state_gradients(plan, refs, ready, val, heads)
    yield
    d_matrix = None
    if plan.channel:
        d_operands, dq, dk = D.channel_score_gradients(plan, ready.operands, val.d_scores), [], []
        d_operands = [
            s._replace(q_row=o.q_row, k_row=o.k_row, columns=o.columns, levels=o.levels)
            for s, o in zip(d_state_operands, d_operands, strict=True)
        ]
    else:
        d_operands = d_state_operands
        d_matrix, dq, dk = scalar_score_gradients(plan, ready, raw, val.d_scores)
    yield
    d_diagonal = split_rows(jnp.sum(val.do * val.y, -1, keepdims=True), plan.C) if plan.channel else []
    dq, dk, dg = pull(Prepared(d_operands, dq, dk, d_matrix, d_diagonal))
    return Gradients(dq, dk, dv, dg, dbeta)


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
    B, T, HV, _ = inputs["v"].shape
    N, S = T // plan.C, HV // plan.heads
    outputs = {"d" + n: jax.ShapeDtypeStruct(inputs[n].shape, inputs[n].dtype) for n in "qkv"}
    outputs |= {"d" + n: jax.ShapeDtypeStruct(inputs[n].shape, inputs[n].dtype) for n in ("g", "beta") if n in inputs}
    outputs |= {"d" + n: jax.ShapeDtypeStruct((B, *inputs[n].shape), jnp.float32) for n in ("rate", "bias") if n in inputs}
    outputs["dinitial"] = jax.ShapeDtypeStruct(inputs["dfinal"].shape, jnp.float32)
    return call(plan, backward_kernel, "backward", inputs, outputs, (B, S, N), lambda t: N - 1 - t)
