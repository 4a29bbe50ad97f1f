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
from pallas_kernels.tpu.pack import Cut, HeadDecays, Logits, head_decays, interleave, prepare, rows, scores, sequence_cut, times_diagonal
from pallas_kernels.tpu.plan import TINY, Plan, constants, dot, spread, to_block

VMEM_BYTES = 60 * 2**20  # of 64 MiB per core on v5p and tpu7x, 128 MiB on v5e and v6e


class Step(NamedTuple):
    """What all packs of a grid step share: [heads, C, width] values, [C, heads] columns."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    decays: HeadDecays | None
    beta: jax.Array | None
    cut: Cut | None


def load_step(plan: Plan, refs) -> Step:
    """Turns the step's [C, heads, width] blocks heads-first."""
    return Step(
        *(jnp.swapaxes(refs[n][0], 0, 1) for n in "qkv"),
        jnp.swapaxes(refs["g"][0], 0, 1) if plan.channel else None,
        head_decays(plan, refs, refs["g"][0, 0].astype(jnp.float32)) if plan.decay == "head" else None,
        refs["beta"][0, 0].astype(jnp.float32) if plan.delta else None,
        sequence_cut(plan, refs, refs["reset"][0, 0]) if plan.reset else None,
    )


def pack_inputs(plan: Plan, refs, step: Step, heads: list[int]) -> tuple[list, list, list]:
    """q, k and g of a pack, as `prepare` takes them."""
    q, k = ([x[h // plan.group] for h in heads] for x in (step.q, step.k))
    if step.g is not None:
        g = [step.g[h].astype(jnp.float32) for h in heads]
        if plan.gate is not None:
            g = [Logits(x, refs["rate"][h : h + 1], refs["bias"][h : h + 1]) for x, h in zip(g, heads, strict=True)]
        return q, k, g
    if step.decays is None:
        return q, k, [None] * len(heads)
    return q, k, [HeadDecays(*(x[:, h : h + 1] for x in step.decays)) for h in heads]


def forward_pack(plan: Plan, refs, step: Step, heads: list[int]) -> Generator[None, None, list[jax.Array]]:
    state, C = refs["final"], plan.C
    ready = prepare(plan, refs, step.cut, *pack_inputs(plan, refs, step, heads))
    yield
    score = scores(plan, ready, step.cut, plan.delta)
    yield
    if plan.delta:
        beta = [step.beta[:, h : h + 1] for h in heads]
        if "inverse" in refs:
            beta = [jnp.where(b == 0.0, TINY, b) for b in beta]
        solve = yield from inverse(plan, score.kk * spread(plan, beta), refs)
    rounded = [state[0, h].astype(plan.operand) for h in heads]
    if "states" in refs:
        for h, s in zip(heads, rounded, strict=True):
            refs["states"][0, 0, h] = s
    read = [
        dot(plan, rows(op.q_state + op.k_state if plan.delta else op.q_state), s, (1, 1))
        for op, s in zip(ready.operands, rounded, strict=True)
    ]
    yield
    v = [step.v[h] for h in heads]
    if plan.delta:
        r = [b * (vi.astype(jnp.float32) - x[C:]) for b, vi, x in zip(beta, v, read, strict=True)]
        if "inverse" in refs:
            refs["inverse"][0, 0, heads[0] // plan.pack] = solve
        y = dot(plan, to_block(plan, solve, refs["diagonal"][...]), rows(r))
        yield
    else:
        y = rows(v)
    inner = dot(plan, score.qk, y) + times_diagonal(plan, ready, y)
    for p, (h, op) in enumerate(zip(heads, ready.operands, strict=True)):
        update = dot(plan, y[p * C : (p + 1) * C], rows(op.tail), (0, 0))
        state[0, h] = (state[0, h] if op.total is None else state[0, h] * op.total) + update
    yield
    return [((x[:C] + inner[p * C : (p + 1) * C]) * plan.scale).astype(refs["o"].dtype) for p, x in enumerate(read)]


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
    states = pl.BlockSpec((1, 1, heads, plan.V, plan.K), lambda b, s, t: (b, chunk(t), s, 0, 0))
    inverse = pl.BlockSpec((1, 1, heads // plan.pack, C, plan.N), lambda b, s, t: (b, chunk(t), s, 0, 0))
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
        name=f"chunk_{plan.decay}{'_delta' if plan.delta else ''}_{name}",
    )(*inputs.values(), *constant.values())
    return dict(zip(outputs, result, strict=True))


def forward(plan: Plan, inputs: dict[str, jax.Array], save: bool) -> dict[str, jax.Array]:
    """inputs: q, k [B, T, H, K], v [B, T, HV, V], by kind g [B, T, HV, K] or [B, S, T, heads], rate and bias [HV, K],
    reset [B, 1, T, 1], beta [B, S, T, heads], initial [B, HV, V, K].

    T is a multiple of C; S steps of `heads` heads make HV. Returns o, final and, to save, the chunk-start states and the inverses.
    """
    B, T, HV, V = inputs["v"].shape
    N, S = T // plan.C, HV // plan.heads
    outputs = {
        "o": jax.ShapeDtypeStruct(inputs["v"].shape, inputs["v"].dtype),
        "final": jax.ShapeDtypeStruct((B, HV, V, plan.K), jnp.float32),
    }
    if save:
        outputs["states"] = jax.ShapeDtypeStruct((B, N, HV, V, plan.K), plan.operand)
        if plan.delta:
            outputs["inverse"] = jax.ShapeDtypeStruct((B, N, HV // plan.pack, plan.C, plan.N), plan.operand)
    return call(plan, forward_kernel, "forward", inputs, outputs, (B, S, N), lambda t: t)
