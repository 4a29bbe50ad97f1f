"""A few tokens for many sequences whose states live in one pool, moved in place: what a server does between two samplings."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax import sharding
from kda_jax.ops.dispatch import find, tpu_only
from kda_jax.ops.spec import Inputs, OpSpec, need_array, need_decays, need_floats, need_integers


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def decode(
    op: str | Callable,
    pool: Float[Array, "Z HV K V"],
    slots: Int[Array, " B"],
    *arrays: Array,
    advance: Int[Array, " B"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "Z HV K V"], Float[Array, "B T HV V"]]:
    """T tokens of a recurrence for B sequences, each with a slot of a pool of states; T = 1 decodes, a few verify drafted tokens.

    Slots that are not named keep every bit. Give the pool to `jax.jit` with `donate_argnums`, or it is copied.

    Args:
        op: a recurrence or its name, e.g. `ops.kda` or "kda".
        pool: [Z, HV, K, V] float32, one state per slot.
        slots: [B] integers in [0, Z), no slot twice.
        arrays: the op's arrays, in the order it takes them, with axes [B, T, ...].
        advance: [B] integers in [0, T]: how many of its T tokens each state takes, all of them if None. The outputs are of all T tokens:
            to verify drafts, call with zeros, then again with the numbers accepted.
        scale: of the output; K ** -0.5 if None.
        implementation: "xla", "pallas_tpu", or None for the better that applies.

    Returns:
        the pool after it, and the outputs [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: an argument has the wrong shape, or slots or decays that can be seen are wrong: twice the same, outside, above zero.
        NotImplementedError: the named implementation does not apply; the message says why.

    Numerics: the op's step, float32. Sharding: the kernel is for one device or the inside of a `jax.shard_map`.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> pool, one = jnp.zeros((3, 1, 1, 1)), jnp.ones((1, 2, 1, 1))
        >>> pool, o = ops.decode("linear_attention", pool, jnp.array([1]), one, one, one, advance=jnp.array([1]))
        >>> o.ravel().tolist(), pool.ravel().tolist()      # both outputs; the state took the first token
        ([1.0, 2.0], [0.0, 1.0, 0.0])
    """
    spec, inputs = find(op, arrays)
    name = spec.name
    _check(spec, pool, slots, inputs, advance)
    if implementation not in (None, "xla", "pallas_tpu"):
        raise ValueError(f"{name}: implementation of decode is {implementation!r}, expected None, 'xla' or 'pallas_tpu'")
    refused = _refused(pool, inputs)
    if implementation == "pallas_tpu" and refused:
        raise NotImplementedError(f"{name}: implementation 'pallas_tpu' of decode does not apply: {refused}")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    here = sharding.platform() == "tpu" and (sharding.ambient() is None or sharding.inside_shard_map())
    if implementation == "pallas_tpu" or (implementation is None and here and not refused):
        from pallas_kernels import tpu

        with tpu_only(name):
            return tpu.decode(pool, slots, *inputs, advance=advance, scale=scale)
    return _decode_xla(spec, pool, slots, inputs, advance, scale)


def _decode_xla(spec: OpSpec, pool, slots, inputs: Inputs, advance, scale) -> tuple[Array, Array]:
    """The step, T times, on the states of the slots."""
    T = inputs.q.shape[1]

    def body(carry, token):
        state, kept = carry
        t, token = token
        state, o = spec.step(state, *spec.arrays(Inputs(*token)), scale=scale)
        kept = state if advance is None else jnp.where((t < advance)[:, None, None, None], state, kept)
        return (state, kept), o

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(pool.dtype), 1, 0), tuple(inputs))
    start = pool[slots]
    (_, kept), o = jax.lax.scan(body, (start, start), (jnp.arange(T), tokens))
    return pool.at[slots].set(kept), jnp.moveaxis(o, 0, 1).astype(inputs.v.dtype)


def _refused(pool, inputs: Inputs) -> str | None:
    K, V = pool.shape[2:]
    if inputs.v.size == 0:
        return "there is nothing to compute"
    if K % 128 or V % 128:
        return f"it takes K and V that are multiples of 128, got {K} and {V}"
    return None if pool.dtype == jnp.float32 else f"it takes a float32 pool, got {pool.dtype}"


def _check(spec: OpSpec, pool, slots, inputs: Inputs, advance) -> None:
    """One sentence for every way the arguments can be wrong."""

    def need(ok, name, x, expected):
        if not ok:
            raise ValueError(f"{spec.name}: {name} has shape {tuple(jnp.shape(x))}, expected {expected}")

    q, k, v, g, beta = inputs
    need_floats(spec.name, dict(pool=pool, **{name: getattr(inputs, name) for name in spec.arguments}))
    need_array(spec.name, "slots", slots)
    need_integers(spec.name, dict(slots=slots, advance=advance))
    need(q.ndim == 4 and q.shape[2] > 0, "q", q, "[B, T, H, K] with H at least 1")
    B, T, H, K = q.shape
    need(k.shape == q.shape, "k", k, f"the shape of q, {q.shape}")
    need(v.ndim == 4 and v.shape[:2] == (B, T) and v.shape[2] % H == 0, "v", v, f"[{B}, {T}, HV, V] with HV a multiple of {H}")
    HV, V = v.shape[2:]
    need(pool.ndim == 4 and pool.shape[1:] == (HV, K, V), "pool", pool, f"[Z, {HV}, {K}, {V}]")
    need(slots.shape == (B,), "slots", slots, f"({B},)")
    need(advance is None or advance.shape == (B,), "advance", advance, f"({B},)")
    shapes = {"head": (B, T, HV), "channel": (B, T, HV, K)}
    if g is not None:
        allowed = [shapes[d] for d in spec.decays]
        need(g.shape in allowed, "g", g, " or ".join(map(str, allowed)))
    need(beta is None or beta.shape == (B, T, HV), "beta", beta, f"({B}, {T}, {HV})")
    if not isinstance(slots, jax.core.Tracer):
        seen = slots.tolist()
        if len(set(seen)) < B:
            raise ValueError(f"{spec.name}: slots {seen} name a slot twice")
        if B and not 0 <= min(seen) <= max(seen) < len(pool):
            raise ValueError(f"{spec.name}: slots {seen} are not all in 0..{len(pool) - 1}")
    if g is not None:
        need_decays(spec.name, g)
