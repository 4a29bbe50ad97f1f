"""The seven kernel calls of a forward and its backward: grids, blocks and what lies between them in memory.

Arrays [B, T, heads, width] are read in place. What passes from kernel to kernel is [terms, B HV, T, width]: a head's tokens together, and
each float32 array as the bfloat16 terms that products take: two, the bytes of float32 with nothing left to convert. The kernel of key
channels alone takes float32 arrays, to multiply by decays.

Each array counted once, bfloat16, B, T, H = 8, 2048, 16, K = V = 128, chunks of 64 (262,144 token-heads; a forward moves at least 1.5 KB
of each, both directions 4.4 KB): megabytes, and their time in ms at 4.8 TB/s; GFLOP of the products, every term counted, at 790 TFLOP/s;
last, the time of the kernel alone on an H200.

    kernel     grid                          MB     ms    GFLOP    ms  measured  reads -> writes (bytes of a token-head)
    chunk      head, chunk                  809   0.17     225   0.28      1.21   q k g(512) -> q_in k_in k_out(512 each) qk solve(256 each)
    walk       head, columns of V           959   0.20     103   0.13      0.55   those, v -> o, states(1024)
    decay      head, chunk                  673   0.14      17   0.02      0.28   q k g -> q_in k_in k_out
    walk_back  head, columns of V           973   0.20      86   0.11      0.59   those, qk solve do -> dr(512), dends(1024)
    values     head, chunk                 1007   0.21      47   0.06      0.50   v do k_in solve states dr -> dv, y(512) dqk da(256 each)
    edges      head and channels, chunk    1208   0.25      60   0.08      0.35   do y dr states dends -> dq_in dk_in dk_out(512 each)
    channels   head and channels, chunk    1074   0.22     266   0.34      1.70   q k g those dqk da -> dq dk dg(512)
    sum                                    6703   1.40     804   1.02      5.2    forward 1768 MB, 1.7 ms

By the larger of the two of every kernel the floor is 1.6 ms, 0.5 of it forward. What lies between is latency, by the hardware's counters:
two programs of four warps fit on a multiprocessor (255 registers a thread), so that loads, barriers and the hand-over of operands to the
matrix units show. A spill costs most of all: shared memory takes the whole of the first cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu.chunk import chunk_kernel, decay_kernel
from pallas_kernels.gpu.gradients import channels_kernel, edges_kernel, values_kernel
from pallas_kernels.gpu.plan import Plan, masks
from pallas_kernels.gpu.walk import backward_walk, forward_walk

Operand = tuple  # an array, or the shape and dtype of a result; and its BlockSpec


def token(plan: Plan, x, *, group: int = 1, parts: int = 1, split: bool = False) -> Operand:
    """A chunk of a head of [B, T, heads, width]: [C, width]; of [B, T, HV]: [C]. Where the first axis of the grid counts heads and `parts`
    of each, the width may be split into as many."""
    head = lambda i: (i // parts // plan.HV, i // parts % plan.HV // group)
    if len(x.shape) == 3:
        return x, pl.BlockSpec((None, plan.C, None), lambda i, n: (head(i)[0], n, head(i)[1]))
    index = lambda i, n: (head(i)[0], n, head(i)[1], i % parts if split else 0)
    return x, pl.BlockSpec((None, plan.C, None, x.shape[-1] // parts if split else x.shape[-1]), index)


def row(plan: Plan, x, *, parts: int = 1) -> Operand:
    """A chunk of a head of [terms, B HV, T, width]: [terms, C, width]; of [B HV, T]: [C]."""
    if len(x.shape) == 2:
        return x, pl.BlockSpec((None, plan.C), lambda i, n: (i, n))
    return x, pl.BlockSpec((x.shape[0], None, plan.C, x.shape[-1]), lambda i, n: (0, i // parts, n, 0))


def edge(plan: Plan, x, *, parts: int = 1) -> Operand:
    """A chunk's [terms, K / parts, V] of [terms, B HV, N, K, V]."""
    index = lambda i, n: (0, i // parts, n, i % parts, 0)
    return x, pl.BlockSpec((x.shape[0], None, None, x.shape[3] // parts, x.shape[4]), index)


def total_decay(x, *, parts: int = 1) -> Operand:
    """A chunk's [K / parts] of [B HV, N, K]."""
    return x, pl.BlockSpec((None, None, x.shape[-1] // parts), lambda i, n: (i // parts, n, i % parts))


def walked_token(plan: Plan, x, block: int | None = None) -> Operand:
    """All tokens of a head of [B, T, HV, V], a block of columns by the grid's second axis; of [B, T, HV]: [T]."""
    head = lambda i: (i // plan.HV, i % plan.HV)
    if len(x.shape) == 3:
        return x, pl.BlockSpec((None, x.shape[1], None), lambda i, j: (head(i)[0], 0, head(i)[1]))
    return x, pl.BlockSpec((None, x.shape[1], None, block), lambda i, j: (head(i)[0], 0, head(i)[1], j))


def walked(x, *, axis: int, block: int | None = None) -> Operand:
    """All of a head, which lies along `axis`, or a block of its columns, the last axis."""
    shape = [*x.shape[:-1], block or x.shape[-1]]
    shape[axis] = None
    index = lambda i, j: (*(i if a == axis else 0 for a in range(len(shape) - 1)), j if block else 0)
    return x, pl.BlockSpec(tuple(shape), index)


def constant(plan: Plan) -> Operand:
    """All of `masks`, for every program."""
    x = jnp.asarray(masks(plan), jnp.bfloat16)
    return x, pl.BlockSpec(x.shape, lambda *_: (0, 0, 0))


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


def prepare(plan: Plan, q, k, g, beta=None) -> tuple[list[jax.Array], list[jax.Array]]:
    """([q_in, k_in, k_out in terms [B HV, T, K], total [B HV, N, K]], given beta [qk, inverse] in terms [B HV, T, C])."""
    B, T = q.shape[:2]
    heads, N, C, K = B * plan.HV, T // plan.C, plan.C, plan.K
    moved = row(plan, like(plan.terms, heads, T, K, dtype=jnp.bfloat16))
    products = row(plan, like(plan.terms, heads, T, C, dtype=jnp.bfloat16))
    total = total_decay(like(heads, N, K))
    ins = [constant(plan), token(plan, q, group=plan.group), token(plan, k, group=plan.group), token(plan, g)]
    outs = [moved, moved, moved, total]
    if beta is None:
        return call(plan, functools.partial(decay_kernel, plan, plan.block("decay", K)), "decay", (heads, N), ins, outs), []
    kernel = functools.partial(chunk_kernel, plan, plan.block("chunk", K))
    out = call(plan, kernel, "chunk", (heads, N), [*ins, token(plan, beta)], [*outs, products, products])
    return out[:4], out[4:]


def walk(plan: Plan, kernel, name: str, x, beta, prepared, products, state, outs: list[Operand]) -> list[jax.Array]:
    """`x` is v or do, `state` the one to start from, [B HV, K, V]; the rest as `prepare` returns it."""
    *moved, total = prepared
    block = plan.block(name, plan.V)
    ins = [walked_token(plan, x, block), walked_token(plan, beta), *(walked(y, axis=1) for y in moved), walked(total, axis=0)]
    ins += [*(walked(y, axis=1) for y in products), walked(state, axis=0, block=block)]
    return call(plan, functools.partial(kernel, plan), name, (state.shape[0], plan.V // block), ins, outs)


def forward(plan: Plan, q, k, v, g, beta, state, *, save: bool) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """o, the final state and, if `save`, what the backward keeps, in terms: states [B HV, N, K, V] before every chunk, qk and
    inverse [B HV, T, C]."""
    B, T = v.shape[:2]
    heads, K, V, block = B * plan.HV, plan.K, plan.V, plan.block("walk", plan.V)
    prepared, products = prepare(plan, q, k, g, beta)
    outs = [walked_token(plan, like(*v.shape, dtype=v.dtype), block), walked(like(heads, K, V), axis=0, block=block)]
    if save:
        outs.append(walked(like(plan.terms, heads, T // plan.C, K, V, dtype=jnp.bfloat16), axis=1, block=block))
    o, final, *states = walk(plan, forward_walk, "walk", v, beta, prepared, products, state.reshape(heads, K, V), outs)
    return o, final.reshape(state.shape), [*states, *products] if save else []


def backward(plan: Plan, q, k, v, g, beta, states, qk, inverse, do, dfinal) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g, beta and the initial state."""
    B, T, H, K = q.shape
    heads = B * plan.HV
    do = do.astype(v.dtype)
    prepared, _ = prepare(plan, q, k, g)
    dr, dends, dstate = states_backward(plan, prepared, (qk, inverse), beta, states, do, dfinal.reshape(heads, K, plan.V))
    dv, y, dqk, da, dbeta = values_backward(plan, prepared[1], v, beta, states, inverse, do, dr)
    edges = edges_backward(plan, beta, do, y, dr, states, dends)
    dq, dk, dg, dbeta_kk = channels_backward(plan, q, k, g, beta, edges, dqk, da)
    if plan.group > 1:  # summed over value heads in float32, rounded once
        dq, dk = (x.reshape(B, T, H, plan.group, K).sum(3).astype(q.dtype) for x in (dq, dk))
    dbeta = jnp.swapaxes((dbeta + dbeta_kk.sum(0)).reshape(B, plan.HV, T), 1, 2)
    return dq, dk, dv, dg, dbeta, dstate.reshape(dfinal.shape)


def states_backward(plan: Plan, prepared, products, beta, states, do, dfinal) -> list[jax.Array]:
    """In terms dr [B HV, T, V] and dends like `states`; dinitial [B HV, K, V]."""
    block = plan.block("walk_back", plan.V)
    dr = like(plan.terms, dfinal.shape[0], do.shape[1], plan.V, dtype=jnp.bfloat16)
    outs = [
        *(walked(like(*x.shape, dtype=x.dtype), axis=1, block=block) for x in (dr, states)),
        walked(like(*dfinal.shape), axis=0, block=block),
    ]
    return walk(plan, backward_walk, "walk_back", do, beta, prepared, products, dfinal, outs)


def values_backward(plan: Plan, k_in, v, beta, states, inverse, do, dr) -> list[jax.Array]:
    """dv; in terms y [B HV, T, V], dqk and da [B HV, T, C]; dbeta [B HV, T] but for what comes through kk."""
    _, heads, T, V = dr.shape
    products = row(plan, like(plan.terms, heads, T, plan.C, dtype=jnp.bfloat16))
    ins = [token(plan, v), token(plan, do), token(plan, beta), row(plan, k_in), row(plan, inverse), edge(plan, states), row(plan, dr)]
    outs = [token(plan, like(*v.shape, dtype=v.dtype)), row(plan, like(*dr.shape, dtype=dr.dtype)), products, products]
    outs.append(row(plan, like(heads, T)))
    block = plan.block("values", V)
    return call(plan, functools.partial(values_kernel, plan, block), "values", (heads, T // plan.C), ins, outs)


def edges_backward(plan: Plan, beta, do, y, dr, states, dends) -> list[jax.Array]:
    """Gradients of q_in, k_in and k_out [B, T, HV, K], and of the state's decay over each chunk [B HV, N, K]."""
    heads, N = states.shape[1:3]
    parts = plan.K // plan.block("edges", plan.K)
    ins = [token(plan, beta, parts=parts), token(plan, do, parts=parts), row(plan, y, parts=parts), row(plan, dr, parts=parts)]
    ins += [edge(plan, states, parts=parts), edge(plan, dends, parts=parts)]
    moved = token(plan, like(*do.shape[:3], plan.K), parts=parts, split=True)
    total = total_decay(like(heads, N, plan.K), parts=parts)
    kernel = functools.partial(edges_kernel, plan, min(64, plan.V))
    return call(plan, kernel, "edges", (heads * parts, N), ins, [moved, moved, moved, total])


def channels_backward(plan: Plan, q, k, g, beta, edges, dqk, da) -> list[jax.Array]:
    """dq, dk (of every value head, float32 where they share one), dg; dbeta through kk [parts, B HV, T]."""
    _, heads, T, _ = dqk.shape
    parts = plan.K // plan.block("channels", plan.K)
    of_query = lambda x: token(plan, x, group=plan.group, parts=parts, split=True)
    of_value = lambda x: token(plan, x, parts=parts, split=True)
    ins = [constant(plan), of_query(q), of_query(k), of_value(g), token(plan, beta, parts=parts)]
    ins += [*(of_value(x) for x in edges[:3]), total_decay(edges[3], parts=parts), row(plan, dqk, parts=parts), row(plan, da, parts=parts)]
    low = q.dtype if plan.group == 1 else jnp.float32
    through_kk = like(parts, heads, T), pl.BlockSpec((None, None, plan.C), lambda i, n: (i % parts, i // parts, n))
    outs = [*(of_value(like(*g.shape, dtype=dtype)) for dtype in (low, low, g.dtype)), through_kk]
    return call(plan, functools.partial(channels_kernel, plan), "channels", (heads * parts, T // plan.C), ins, outs)
