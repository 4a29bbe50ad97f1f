"""The six kernel calls of a forward and its backward: grids, blocks and what lies between them in memory.

Arrays [B, T, heads, width] are read in place. What passes from kernel to kernel is [terms, B HV, T, width]: a head's tokens together, and
each float32 array as the bfloat16 terms that products take, the same bytes with nothing left to convert.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu.chunk import chunk_kernel
from pallas_kernels.gpu.gradients import channels_kernel, values_kernel
from pallas_kernels.gpu.plan import Plan
from pallas_kernels.gpu.walk import backward_walk, forward_walk

Operand = tuple  # an array, or the shape and dtype of a result; and its BlockSpec


def token(plan: Plan, x, *, group: int = 1, block: int | None = None) -> Operand:
    """A chunk of a head of [B, T, heads, width]: [C, width], or [C, block] by the grid's third axis; of [B, T, HV]: [C]."""
    head = lambda i: (lax.div(i, plan.HV), lax.div(lax.rem(i, plan.HV), group))
    if len(x.shape) == 3:
        return x, pl.BlockSpec((None, plan.C, None), lambda i, n, j=0: (head(i)[0], n, head(i)[1]))
    index = lambda i, n, j=0: (head(i)[0], n, head(i)[1], 0 if block is None else j)
    return x, pl.BlockSpec((None, plan.C, None, block or x.shape[-1]), index)


def row(plan: Plan, x) -> Operand:
    """A chunk of a head of [terms, B HV, T, width]: [terms, C, width]; of [B HV, T]: [C]."""
    if len(x.shape) == 2:
        return x, pl.BlockSpec((None, plan.C), lambda i, n, j=0: (i, n))
    return x, pl.BlockSpec((x.shape[0], None, plan.C, x.shape[-1]), lambda i, n, j=0: (0, i, n, 0))


def edge(plan: Plan, x, *, block: int | None = None) -> Operand:
    """A chunk's [terms, K or block, V] of [terms, B HV, N, K, V]."""
    index = lambda i, n, j=0: (0, i, n, 0 if block is None else j, 0)
    return x, pl.BlockSpec((x.shape[0], None, None, block or x.shape[3], x.shape[4]), index)


def walked_token(plan: Plan, x) -> Operand:
    """All tokens of a head of [B, T, HV, V], a block of columns on the grid's second axis; of [B, T, HV]: [T]."""
    head = lambda i: (lax.div(i, plan.HV), lax.rem(i, plan.HV))
    if len(x.shape) == 3:
        return x, pl.BlockSpec((None, x.shape[1], None), lambda i, j: (head(i)[0], 0, head(i)[1]))
    return x, pl.BlockSpec((None, x.shape[1], None, columns(plan)), lambda i, j: (head(i)[0], 0, head(i)[1], j))


def walked(plan: Plan, x, *, axis: int, block: bool = False) -> Operand:
    """All of a head, which lies along `axis`; with `block` a block of the columns, the last axis."""
    shape = list(x.shape)
    shape[axis] = None
    if block:
        shape[-1] = columns(plan)
    index = lambda i, j: (*(i if a == axis else 0 for a in range(len(shape) - 1)), j if block else 0)
    return x, pl.BlockSpec(tuple(shape), index)


def columns(plan: Plan) -> int:
    return min(plan.tuning.walk_block, plan.V)


def channels(plan: Plan) -> int:
    return min(plan.tuning.channel_block, plan.K)


def like(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def call(plan: Plan, kernel, name: str, grid: tuple[int, ...], ins: list[Operand], outs: list[Operand], *, warps: int, stages: int = 1):
    """pallas_call; `kernel` takes the refs of `ins` and `outs`."""

    def body(*refs):
        kernel(*refs)

    body.__name__ = f"kda_{name}"  # profiles show it
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec for _, spec in ins],
        out_specs=[spec for _, spec in outs],
        out_shape=[shape for shape, _ in outs],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=plan.interpret,
        name=body.__name__,
    )(*(x for x, _ in ins))


def prepare(plan: Plan, q, k, g, beta, *, solve: bool) -> list[jax.Array]:
    """In terms q_in, k_in, k_out [B HV, T, K], qk and, if `solve`, the inverse [B HV, T, C]; and total [B HV, N, K] in fourth place."""
    B, T = q.shape[:2]
    heads, N, C, K = B * plan.HV, T // plan.C, plan.C, plan.K
    moved = row(plan, like(plan.terms, heads, T, K, dtype=plan.operand))
    products = row(plan, like(plan.terms, heads, T, C, dtype=plan.operand))
    total = like(heads, N, K), pl.BlockSpec((None, None, K), lambda i, n: (i, n, 0))
    ins = [token(plan, q, group=plan.group), token(plan, k, group=plan.group), token(plan, g), token(plan, beta)]
    outs = [moved] * 3 + [total, products] + [products] * solve
    kernel = lambda *refs: chunk_kernel(plan, channels(plan), solve, *refs)
    return call(plan, kernel, "chunk", (heads, N), ins, outs, warps=plan.tuning.chunk_warps)


def walk(plan: Plan, kernel, name: str, x, beta, moved, total, products, state, outs: list[Operand]) -> list[jax.Array]:
    """`x` is v or do, `state` the one to start from, [B HV, K, V]."""
    ins = [walked_token(plan, x), walked_token(plan, beta), *(walked(plan, y, axis=1) for y in moved), walked(plan, total, axis=0)]
    ins += [*(walked(plan, y, axis=1) for y in products), walked(plan, state, axis=0, block=True)]
    body = lambda *refs: kernel(plan, *refs)
    grid, tuning = (state.shape[0], plan.V // columns(plan)), plan.tuning
    return call(plan, body, name, grid, ins, outs, warps=tuning.walk_warps, stages=tuning.walk_stages)


def forward(plan: Plan, q, k, v, g, beta, state, *, save: bool) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """o, the final state and, if `save`, what the backward keeps, in terms: states [B HV, N, K, V] before every chunk, inverse
    [B HV, T, C]."""
    B, T = v.shape[:2]
    heads, K, V = B * plan.HV, plan.K, plan.V
    *moved, total, qk, inverse = prepare(plan, q, k, g, beta, solve=True)
    outs = [walked_token(plan, like(*v.shape, dtype=v.dtype)), walked(plan, like(heads, K, V), axis=0, block=True)]
    if save:
        outs.append(walked(plan, like(plan.terms, heads, T // plan.C, K, V, dtype=plan.operand), axis=1, block=True))
    start = state.reshape(heads, K, V)
    o, final, *states = walk(plan, forward_walk, "walk", v, beta, moved, total, (qk, inverse), start, outs)
    return o, final.reshape(state.shape), {"states": states[0], "inverse": inverse} if save else {}


def backward(plan: Plan, q, k, v, g, beta, states, inverse, do, dfinal) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g, beta and the initial state."""
    B, T, H, _ = q.shape
    heads, C, K, V = B * plan.HV, plan.C, plan.K, plan.V
    do = do.astype(plan.operand)
    *moved, total, qk = prepare(plan, q, k, g, beta, solve=False)
    wide = like(plan.terms, heads, T, V, dtype=plan.operand)
    outs = [walked(plan, x, axis=1, block=True) for x in (wide, like(*states.shape, dtype=states.dtype))]
    outs.append(walked(plan, like(heads, K, V), axis=0, block=True))
    end = dfinal.reshape(heads, K, V)
    dr, dends, dstate = walk(plan, backward_walk, "walk_back", do, beta, moved, total, (qk, inverse), end, outs)

    products = row(plan, like(plan.terms, heads, T, C, dtype=plan.operand))
    ins = [token(plan, v), token(plan, do), token(plan, beta), row(plan, moved[1]), row(plan, inverse), edge(plan, states), row(plan, dr)]
    outs = [token(plan, like(*v.shape, dtype=v.dtype)), row(plan, wide), products, products, row(plan, like(heads, T))]
    kernel = lambda *refs: values_kernel(plan, columns(plan), *refs)
    dv, y, dqk, da, dbeta = call(plan, kernel, "values", (heads, T // C), ins, outs, warps=plan.tuning.values_warps)

    block = channels(plan)
    query = lambda x: token(plan, x, group=plan.group, block=block)
    ins = [query(q), query(k), token(plan, g, block=block), token(plan, beta), token(plan, do), row(plan, y), row(plan, dr)]
    ins += [edge(plan, states, block=block), edge(plan, dends, block=block), row(plan, dqk), row(plan, da)]
    per_head = lambda dtype: token(plan, like(*g.shape, dtype=dtype), block=block)
    through_kk = like(K // block, heads, T), pl.BlockSpec((None, None, C), lambda i, n, j: (j, i, n))
    outs = [per_head(q.dtype if plan.group == 1 else jnp.float32)] * 2 + [per_head(g.dtype), through_kk]
    kernel = lambda *refs: channels_kernel(plan, *refs)
    dq, dk, dg, dbeta_kk = call(plan, kernel, "channels", (heads, T // C, K // block), ins, outs, warps=plan.tuning.channels_warps)

    if plan.group > 1:  # summed over value heads in float32, rounded once
        dq, dk = (x.reshape(B, T, H, plan.group, K).sum(3).astype(q.dtype) for x in (dq, dk))
    dbeta = jnp.swapaxes((dbeta + dbeta_kk.sum(0)).reshape(B, plan.HV, T), 1, 2)
    return dq, dk, dv, dg, dbeta, dstate.reshape(dfinal.shape)
