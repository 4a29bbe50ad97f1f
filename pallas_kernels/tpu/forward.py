"""The forward kernel: one grid step is one chunk of `heads` value heads; chunks of a row run in order and carry the state in VMEM."""

import functools
from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.decay import decay_constants
from pallas_kernels.tpu.inverse import inverse
from pallas_kernels.tpu.pack import (
    Cut,
    HeadDecays,
    Logits,
    Prepared,
    head_decays,
    interleave,
    inverse_norm,
    prepare,
    scores,
    sequence_cut,
    times_diagonal,
)
from pallas_kernels.tpu.plan import TINY, Plan, constants, dot, rows, side_by_side, split_rows, spread, terms, to_block
from pallas_kernels.tpu.tiles import VMEM_BYTES, kind


class Step(NamedTuple):
    """What all packs of a grid step share: [heads, C, width] values, [C, heads] columns; norms [C, 1] by query head."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    decays: HeadDecays | None
    beta: jax.Array | None
    cut: Cut | None
    q_norm: list[jax.Array] | None
    k_norm: list[jax.Array] | None


def load_step(plan: Plan, refs) -> Step:
    """Turns the step's [C, heads, width] blocks heads-first."""
    q, k, v = (jnp.swapaxes(refs[n][0], 0, 1) for n in "qkv")
    return Step(
        q,
        k,
        v,
        jnp.swapaxes(refs["g"][0], 0, 1) if plan.channel else None,
        head_decays(plan, refs, refs["g"][0, 0].astype(jnp.float32)) if plan.decay == "head" else None,
        refs["beta"][0, 0].astype(jnp.float32) if plan.delta else None,
        sequence_cut(plan, refs, refs["reset"][0, 0]) if plan.reset else None,
        *([inverse_norm(h) for h in x] if plan.normalize else None for x in (q, k)),
    )


def pack_inputs(plan: Plan, refs, step: Step, heads: list[int]) -> tuple[list, list, list]:
    """q, k and g of a pack, as `prepare` takes them."""
    q, k = ([x[h // plan.group] for h in heads] for x in (step.q, step.k))
    if step.g is not None:
        q, k = ([x.astype(jnp.float32) for x in xs] for xs in (q, k))
        g = [step.g[h].astype(jnp.float32) for h in heads]
        if plan.gate is not None:
            g = [Logits(x, refs["rate"][h : h + 1], refs["bias"][h : h + 1]) for x, h in zip(g, heads, strict=True)]
        return q, k, g
    if step.decays is None:
        return q, k, [None] * len(heads)
    return q, k, [HeadDecays(*(x[:, h : h + 1] for x in step.decays)) for h in heads]


class Factors(NamedTuple):
    """Columns [C, 1] of one head that scale products token by token.

    With n = 1 / |k| the rule on normalised keys is the rule on raw ones for z = n y:  (I + diag(beta n^2) kk) z = beta n (v - n k S),
    S' = S + k^T z. So normalising costs these columns and rounds nothing.
    """

    query: jax.Array | float  # output scale / |q|
    key: jax.Array | float  # n = 1 / |k|, or 1
    write: jax.Array | None  # beta n; None without the delta rule


def factors(plan: Plan, step: Step, head: int, beta: jax.Array | None) -> Factors:
    if not plan.normalize:
        return Factors(plan.scale, 1.0, beta)
    query, key = (x[head // plan.group] for x in (step.q_norm, step.k_norm))
    return Factors(query * plan.scale, key, None if beta is None else beta * key)


def betas(plan: Plan, refs, step: Step, heads: list[int]) -> list[jax.Array | None]:
    """Columns [C, 1], never zero where gradients are wanted; None without the delta rule."""
    if not plan.delta:
        return [None] * len(heads)
    beta = [step.beta[:, h : h + 1] for h in heads]
    return [jnp.where(b == 0.0, TINY, b) for b in beta] if "inverse" in refs else beta


def written(plan: Plan, v: list[jax.Array], read_k: list[jax.Array], ready: Prepared, factor: list[Factors], solve) -> jax.Array:
    """z [N, V], what the pack's tokens write; `solve` the inverse in block form."""
    if not plan.delta:
        return rows([x if isinstance(f.key, float) else x.astype(jnp.float32) * f.key for x, f in zip(v, factor, strict=True)])
    r = []
    for vi, x, op, f in zip(v, read_k, ready.operands, factor, strict=True):
        r.append(f.write * (vi.astype(jnp.float32) - decayed(x, op.into) * f.key))
    return dot(plan, solve, rows(r))


def decayed(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def forward_pack(plan: Plan, refs, step: Step, heads: list[int]) -> Generator[None, None, list[jax.Array]]:
    state, C = refs["final"], plan.C
    ready = prepare(plan, refs, step.cut, *pack_inputs(plan, refs, step, heads))
    yield
    score = scores(plan, ready, step.cut, plan.delta)
    yield
    factor = [factors(plan, step, h, b) for h, b in zip(heads, betas(plan, refs, step, heads), strict=True)]
    solve = None
    if plan.delta:
        solve = yield from inverse(plan, score.kk * spread(plan, [f.write * f.key for f in factor]), refs)
    carried = [terms(plan, state[0, h]) for h in heads]
    if "states" in refs:
        for h, s in zip(heads, carried, strict=True):
            refs["states"][0, 0, h] = side_by_side(s)
    if "starts" in refs:
        for h in heads:
            refs["starts"][0, 0, h] = state[0, h]
    reads = [rows(op.q_state + op.k_state if plan.delta else op.q_state) for op in ready.operands]
    read = [dot(plan, x, s, (1, 1)) for x, s in zip(reads, carried, strict=True)]
    yield
    if plan.delta:
        solve = terms(plan, solve)
        if "inverse" in refs:
            refs["inverse"][0, 0, heads[0] // plan.pack] = side_by_side(solve)
        solve = to_block(plan, solve, refs["diagonal"][...])
    z = written(plan, [step.v[h] for h in heads], [x[C:] for x in read], ready, factor, solve)
    if plan.delta and "inverse" in refs:  # a token without beta writes nothing, not even the trace that the backward looks for
        z = jnp.where(rows([step.beta[:, h : h + 1] == 0.0 for h in heads]), 0.0, z)
    yield
    inner = dot(plan, score.qk, z) + times_diagonal(plan, ready, z)
    for p, (h, op) in enumerate(zip(heads, ready.operands, strict=True)):
        update = dot(plan, decayed(z[p * C : (p + 1) * C], op.outof), rows(op.tail), (0, 0))
        state[0, h] = decayed(state[0, h], op.total) + update
    yield
    inner = split_rows(inner, C)
    out = [f.query * (decayed(x[:C], op.into) + y) for f, x, op, y in zip(factor, read, ready.operands, inner, strict=True)]
    return [o.astype(refs["o"].dtype) for o in out]


def forward_kernel(plan: Plan, names: tuple[str, ...], *refs):
    refs = dict(zip(names, refs, strict=True))
    state = refs["final"]

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = refs["initial"][...] if "initial" in refs else jnp.zeros_like(state)

    step = load_step(plan, refs)
    packs = [forward_pack(plan, refs, step, list(range(h, h + plan.pack))) for h in range(0, plan.heads, plan.pack)]
    out = [o for pack in interleave(packs) for o in pack]
    refs["o"][0] = jnp.swapaxes(jnp.stack(out), 0, 1)


def all_constants(plan: Plan) -> dict[str, jax.Array]:
    constant = {**constants(plan), **decay_constants(plan)}
    return constant if plan.delta else {n: c for n, c in constant.items() if n not in ("levels", "eye", "diagonal")}


def block_specs(plan: Plan, chunk) -> dict[str, pl.BlockSpec]:
    """Blocks of every operand by name; `chunk` maps the last grid index to a chunk."""
    C, heads = plan.C, plan.heads
    token = lambda n, width: pl.BlockSpec((1, C, n, width), lambda b, s, t: (b, chunk(t), s, 0))
    column = pl.BlockSpec((1, 1, C, heads), lambda b, s, t: (b, s, chunk(t), 0))
    state = pl.BlockSpec((1, heads, plan.V, plan.K), lambda b, s, t: (b, s, 0, 0))
    query, value = token(heads // plan.group, plan.K), token(heads, plan.V)
    decay = token(heads, plan.K) if plan.channel else column
    states = pl.BlockSpec((1, 1, heads, plan.V, plan.saved_terms * plan.K), lambda b, s, t: (b, chunk(t), s, 0, 0))
    inverse = pl.BlockSpec((1, 1, heads // plan.pack, C, plan.saved_terms * plan.N), lambda b, s, t: (b, chunk(t), s, 0, 0))
    return {
        **dict.fromkeys(("q", "k", "dq", "dk"), query),
        **dict.fromkeys(("v", "o", "do", "dv"), value),
        **dict.fromkeys(("g", "dg"), decay),
        **dict.fromkeys(("beta", "dbeta"), column),
        **dict.fromkeys(("initial", "final", "dfinal", "dinitial"), state),
        "reset": pl.BlockSpec((1, 1, C, 1), lambda b, s, t: (b, 0, chunk(t), 0)),
        **dict.fromkeys(("rate", "bias"), pl.BlockSpec((heads, plan.K), lambda b, s, t: (s, 0))),
        **dict.fromkeys(("drate", "dbias"), pl.BlockSpec((1, heads, plan.K), lambda b, s, t: (b, s, 0))),
        "states": states,
        "starts": pl.BlockSpec((1, 1, heads, plan.V, plan.K), lambda b, s, t: (b, chunk(t), s, 0, 0)),
        "inverse": inverse,
    }


def call(plan: Plan, kernel, name: str, inputs: dict, outputs: dict, grid: tuple[int, int, int], chunk) -> dict[str, jax.Array]:
    """pallas_call with operands by name."""
    specs, constant = block_specs(plan, chunk), all_constants(plan)
    names = (*inputs, *constant, *outputs)
    whole = [pl.BlockSpec(c.shape, functools.partial(lambda d, *_: (0,) * d, c.ndim)) for c in constant.values()]
    result = pl.pallas_call(
        functools.partial(kernel, plan, names),
        grid=grid,
        in_specs=[specs[n] for n in inputs] + whole,
        out_specs=[specs[n] for n in outputs],
        out_shape=list(outputs.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        name=f"chunk_{kind(plan.decay, plan.delta)}_{name}",
    )(*inputs.values(), *constant.values())
    return dict(zip(outputs, result, strict=True))


def by_step(plan: Plan, x: jax.Array) -> jax.Array:
    """Columns [B, T, HV] -> [B, S, T, heads], what the blocks of a step need."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, plan.heads), 1, 2)


def columns_by_step(plan: Plan, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {n: by_step(plan, x) if n in ("g", "beta") and x.ndim == 3 else x for n, x in inputs.items()}


def forward(plan: Plan, inputs: dict[str, jax.Array], save: tuple[str, ...] = ()) -> dict[str, jax.Array]:
    """inputs: q, k [B, T, H, K], v [B, T, HV, V], by kind g [B, T, HV, K] or [B, T, HV], rate and bias [HV, K],
    reset [B, 1, T, 1], beta [B, T, HV], initial [B, HV, V, K]; T a multiple of C, HV of `heads`.

    Returns o, final and of `save`: the chunk-start "states" and the "inverse" for the backward, in terms, or "starts", the states in
    float32.
    """
    inputs = columns_by_step(plan, inputs)
    B, T, HV, V = inputs["v"].shape
    N, S = T // plan.C, HV // plan.heads
    outputs = {
        "o": jax.ShapeDtypeStruct(inputs["v"].shape, inputs["v"].dtype),
        "final": jax.ShapeDtypeStruct((B, HV, V, plan.K), jnp.float32),
        "states": jax.ShapeDtypeStruct((B, N, HV, V, plan.saved_terms * plan.K), plan.operand),
        "starts": jax.ShapeDtypeStruct((B, N, HV, V, plan.K), jnp.float32),
        "inverse": jax.ShapeDtypeStruct((B, N, HV // plan.pack, plan.C, plan.saved_terms * plan.N), plan.operand),
    }
    wanted = {"o", "final", *save} - (set() if plan.delta else {"inverse"})
    outputs = {n: x for n, x in outputs.items() if n in wanted}
    return call(plan, forward_kernel, "forward", inputs, outputs, (B, S, N), lambda t: t)
