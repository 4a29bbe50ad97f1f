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


def walked_token(plan: Plan, x, block: int | None = None) -> Operand:
    """All tokens of a head of [B, T, HV, V], a block of columns by the grid's second axis; of [B, T, HV]: [T]."""
    head = lambda i: (lax.div(i, plan.HV), lax.rem(i, plan.HV))
    if len(x.shape) == 3:
        return x, pl.BlockSpec((None, x.shape[1], None), lambda i, j: (head(i)[0], 0, head(i)[1]))
    return x, pl.BlockSpec((None, x.shape[1], None, block), lambda i, j: (head(i)[0], 0, head(i)[1], j))


def walked(x, *, axis: int, block: int | None = None) -> Operand:
    """All of a head, which lies along `axis`, or a block of its columns, the last axis."""
    shape = [*x.shape[:-1], block or x.shape[-1]]
    shape[axis] = None
    index = lambda i, j: (*(i if a == axis else 0 for a in range(len(shape) - 1)), j if block else 0)
    return x, pl.BlockSpec(tuple(shape), index)


def like(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def call(plan: Plan, kernel, name: str, grid: tuple[int, ...], ins: list[Operand], outs: list[Operand]) -> list[jax.Array]:
    """pallas_call; `kernel` takes the refs of `ins` and `outs`."""
    launch = getattr(plan.tuning, name)

    def body(*refs):
        kernel(*refs)

    body.__name__ = f"kda_{name}"  # profiles show it
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec for _, spec in ins],
        out_specs=[spec for _, spec in outs],
        out_shape=[shape for shape, _ in outs],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=plan.interpret,
        name=body.__name__,
    )(*(x for x, _ in ins))


def prepare(plan: Plan, name: str, q, k, g, beta) -> list[jax.Array]:
    """In terms q_in, k_in, k_out [B HV, T, K], qk and, as "chunk", the inverse [B HV, T, C]; total [B HV, N, K] in fourth place."""
    B, T = q.shape[:2]
    heads, N, C, K, solve = B * plan.HV, T // plan.C, plan.C, plan.K, name == "chunk"
    moved = row(plan, like(plan.terms, heads, T, K, dtype=jnp.bfloat16))
    products = row(plan, like(plan.terms, heads, T, C, dtype=jnp.bfloat16))
    total = like(heads, N, K), pl.BlockSpec((None, None, K), lambda i, n: (i, n, 0))
    ins = [token(plan, q, group=plan.group), token(plan, k, group=plan.group), token(plan, g), token(plan, beta)]
    outs = [moved] * 3 + [total, products] + [products] * solve
    block = plan.block(name, K)
    return call(plan, lambda *refs: chunk_kernel(plan, block, solve, *refs), name, (heads, N), ins, outs)


def walk(plan: Plan, kernel, name: str, x, beta, prepared, inverse, state, outs: list[Operand]) -> list[jax.Array]:
    """`x` is v or do, `state` the one to start from, [B HV, K, V]."""
    *moved, total, qk = prepared
    block = plan.block(name, plan.V)
    ins = [walked_token(plan, x, block), walked_token(plan, beta), *(walked(y, axis=1) for y in moved), walked(total, axis=0)]
    ins += [walked(qk, axis=1), walked(inverse, axis=1), walked(state, axis=0, block=block)]
    return call(plan, lambda *refs: kernel(plan, *refs), name, (state.shape[0], plan.V // block), ins, outs)


def forward(plan: Plan, q, k, v, g, beta, state, *, save: bool) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """o, the final state and, if `save`, what the backward keeps, in terms: states [B HV, N, K, V] before every chunk, inverse
    [B HV, T, C]."""
    B, T = v.shape[:2]
    heads, K, V, block = B * plan.HV, plan.K, plan.V, plan.block("walk", plan.V)
    *prepared, inverse = prepare(plan, "chunk", q, k, g, beta)
    outs = [walked_token(plan, like(*v.shape, dtype=v.dtype), block), walked(like(heads, K, V), axis=0, block=block)]
    if save:
        outs.append(walked(like(plan.terms, heads, T // plan.C, K, V, dtype=jnp.bfloat16), axis=1, block=block))
    o, final, *states = walk(plan, forward_walk, "walk", v, beta, prepared, inverse, state.reshape(heads, K, V), outs)
    return o, final.reshape(state.shape), {"states": states[0], "inverse": inverse} if save else {}


def backward(plan: Plan, q, k, v, g, beta, states, inverse, do, dfinal) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g, beta and the initial state."""
    B, T, H, K = q.shape
    heads = B * plan.HV
    do = do.astype(v.dtype)
    prepared = prepare(plan, "chunk_again", q, k, g, beta)
    dr, dends, dstate = states_backward(plan, prepared, beta, states, inverse, do, dfinal.reshape(heads, K, plan.V))
    dv, y, dqk, da, dbeta = values_backward(plan, prepared[1], v, beta, states, inverse, do, dr)
    dq, dk, dg, dbeta_kk = channels_backward(plan, q, k, g, beta, do, y, dr, states, dends, dqk, da)
    if plan.group > 1:  # summed over value heads in float32, rounded once
        dq, dk = (x.reshape(B, T, H, plan.group, K).sum(3).astype(q.dtype) for x in (dq, dk))
    dbeta = jnp.swapaxes((dbeta + dbeta_kk.sum(0)).reshape(B, plan.HV, T), 1, 2)
    return dq, dk, dv, dg, dbeta, dstate.reshape(dfinal.shape)


def states_backward(plan: Plan, prepared, beta, states, inverse, do, dfinal) -> list[jax.Array]:
    """In terms dr [B HV, T, V] and dends like `states`; dinitial [B HV, K, V]."""
    block = plan.block("walk_back", plan.V)
    dr = like(plan.terms, dfinal.shape[0], do.shape[1], plan.V, dtype=jnp.bfloat16)
    outs = [
        *(walked(like(*x.shape, dtype=x.dtype), axis=1, block=block) for x in (dr, states)),
        walked(like(*dfinal.shape), axis=0, block=block),
    ]
    return walk(plan, backward_walk, "walk_back", do, beta, prepared, inverse, dfinal, outs)


def values_backward(plan: Plan, k_in, v, beta, states, inverse, do, dr) -> list[jax.Array]:
    """dv; in terms y [B HV, T, V], dqk and da [B HV, T, C]; dbeta [B HV, T] but for what comes through kk."""
    _, heads, T, V = dr.shape
    products = row(plan, like(plan.terms, heads, T, plan.C, dtype=jnp.bfloat16))
    ins = [token(plan, v), token(plan, do), token(plan, beta), row(plan, k_in), row(plan, inverse), edge(plan, states), row(plan, dr)]
    outs = [token(plan, like(*v.shape, dtype=v.dtype)), row(plan, like(*dr.shape, dtype=dr.dtype)), products, products]
    outs.append(row(plan, like(heads, T)))
    block = plan.block("values", V)
    return call(plan, lambda *refs: values_kernel(plan, block, *refs), "values", (heads, T // plan.C), ins, outs)


def channels_backward(plan: Plan, q, k, g, beta, do, y, dr, states, dends, dqk, da) -> list[jax.Array]:
    """dq, dk (of every value head, float32 where they share one), dg; dbeta through kk [K / block, B HV, T]."""
    _, heads, T, _ = dr.shape
    K, block = plan.K, plan.block("channels", plan.K)
    query = lambda x: token(plan, x, group=plan.group, block=block)
    ins = [query(q), query(k), token(plan, g, block=block), token(plan, beta), token(plan, do), row(plan, y), row(plan, dr)]
    ins += [edge(plan, states, block=block), edge(plan, dends, block=block), row(plan, dqk), row(plan, da)]
    per_head = lambda dtype: token(plan, like(*g.shape, dtype=dtype), block=block)
    through_kk = like(K // block, heads, T), pl.BlockSpec((None, None, plan.C), lambda i, n, j: (j, i, n))
    outs = [per_head(q.dtype if plan.group == 1 else jnp.float32)] * 2 + [per_head(g.dtype), through_kk]
    return call(plan, lambda *refs: channels_kernel(plan, *refs), "channels", (heads, T // plan.C, K // block), ins, outs)
