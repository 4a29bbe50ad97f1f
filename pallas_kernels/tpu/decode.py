"""The decode kernel: a few tokens for a batch of states that live in a pool and are moved in place."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.plan import LANES

HEADS_PER_STEP = 16
SUBLANES = 8


def decode(
    pool: jax.Array,
    slots: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    advance: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """T tokens of S_t = (I - beta k k^T) Diag(e^g) S_(t-1) + beta k v^T, o_t = scale q^T S_t for B rows, each with a slot of a pool.

    A state is read once and written once whatever T is. Nothing else of the pool is touched: give the pool to jit with `donate_argnums`.

    Args:
      pool: [Z, HV, K, V] float32, one state per slot; K and V multiples of 128.
      slots: [B] int32, the slot of each row; no slot twice.
      q, k: [B, T, H, K]; v: [B, T, HV, V]; any float type, T small (it is unrolled).
      g: natural log decays <= 0: None, [B, T, HV] or [B, T, HV, K].
      beta: [B, T, HV]; None turns the delta rule off.
      advance: [B] int32, how many of its T tokens each row's state takes; all of them by default. The outputs are of all T: to verify
        drafted tokens, call with zeros, then again with the numbers accepted.
      scale: multiplies the output; K^-0.5 by default.

    Returns:
      the pool; o [B, T, HV, V] in v's type.

    Raises:
      NotImplementedError: K or V not a multiple of 128, or a pool that is not float32.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if pool.shape[1:] != (HV, K, V) or HV % H:
        raise ValueError(f"pool {pool.shape} must be [Z, {HV}, {K}, {V}] and {HV} a multiple of {H}")
    if K % LANES or V % LANES or pool.dtype != jnp.float32:
        raise NotImplementedError(f"the decode kernel takes a float32 pool with K and V multiples of {LANES}, got {pool.dtype} {K}, {V}")
    share = lambda x: jnp.repeat(x.astype(jnp.float32), HV // H, 2)
    across = lambda x: jnp.broadcast_to(x.astype(jnp.float32)[..., None], v.shape)  # one number per head as a row
    operands = {"q": share(q) * (K**-0.5 if scale is None else scale), "k": share(k), "v": v.astype(jnp.float32)}
    if g is not None:
        decay = jnp.exp(g.astype(jnp.float32))
        operands["decay"] = decay if g.ndim == 4 else across(decay)
    if beta is not None:
        operands["beta"] = across(beta)
    taken = jnp.full(B, T, jnp.int32) if advance is None else advance.astype(jnp.int32)
    kernel = functools.partial(decode_kernel, tuple(operands), g is not None and g.ndim == 4, advance is None)
    pool, o = decode_call(kernel, pool, slots.astype(jnp.int32), taken, operands)
    return pool, o.astype(v.dtype)


def heads_per_step(HV: int) -> int:
    """A divisor of HV in blocks of 8 heads, or all of them."""
    return max((n for n in range(SUBLANES, HEADS_PER_STEP + 1, SUBLANES) if HV % n == 0), default=HV)


def decode_call(kernel, pool, slots, taken, operands: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (B, T, HV, V), K = operands["v"].shape, operands["k"].shape[-1]
    heads = heads_per_step(HV)
    state = pl.BlockSpec((1, heads, K, V), lambda b, s, slots, taken: (slots[b], s, 0, 0))
    row = lambda width: pl.BlockSpec((1, T, heads, width), lambda b, s, *_: (b, 0, s, 0))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, HV // heads),
            in_specs=[state, *(row(x.shape[-1]) for x in operands.values())],
            out_specs=[state, row(V)],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), jax.ShapeDtypeStruct((B, T, HV, V), jnp.float32)],
        input_output_aliases={2: 0},  # the pool, after the two prefetched arrays
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="decode",
    )(slots, taken, pool, *operands.values())


def decode_kernel(names: tuple[str, ...], per_channel: bool, all_taken: bool, slots, taken, before, *refs):
    """K is in sublanes: rows of V lanes need no move, columns of K come from one transpose of all heads' rows."""
    *inputs, after, o = refs
    refs = dict(zip(names, inputs, strict=True))
    T, heads = o.shape[1:3]
    take = taken[pl.program_id(0)]
    wanted = ("q", "k", "decay") if per_channel else ("q", "k")
    columns = [jnp.swapaxes(jnp.concatenate([refs[n][0, t] for n in wanted], 0), 0, 1) for t in range(T)]
    for h in range(heads):
        state = kept = before[0, h]
        for t in range(T):
            q, k, *decay = (columns[t][:, i * heads + h : i * heads + h + 1] for i in range(len(wanted)))
            y = refs["v"][0, t, h : h + 1]
            if "decay" in refs:
                state = state * (decay[0] if per_channel else refs["decay"][0, t, h : h + 1])
            if "beta" in refs:
                y = refs["beta"][0, t, h : h + 1] * (y - jnp.sum(state * k, 0, keepdims=True))
            state = state + k * y
            o[0, t, h : h + 1] = jnp.sum(state * q, 0, keepdims=True)
            kept = state if all_taken else jnp.where(t < take, state, kept)
        after[0, h] = kept
