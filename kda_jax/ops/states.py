"""The states at the edges of chunks, for snapshots of a prefix: every recurrence computes them on its way and drops them."""

import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax import sharding
from kda_jax.ops.chunkwise import chunkwise_states
from kda_jax.ops.dispatch import _validate, _with_boundaries, _zero_state, choose, find, names_of, one_dtype, run_scan, scale_of, tpu_only
from kda_jax.ops.spec import Inputs, OpSpec


class ChunkStates(NamedTuple):
    """o [B, T, HV, V] in v's dtype, final_state [B, HV, K, V] and states [B, N, HV, K, V], both float32 (float64 for float64)."""

    o: Float[Array, "B T HV V"]
    final_state: Float[Array, "B HV K V"]
    states: Float[Array, "B N HV K V"]
    """N = T // chunk_size + 1; row n is the state after the first n chunk_size tokens, row 0 the initial state."""


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def chunk_states(
    op: str | Callable,
    *arrays: Array,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> ChunkStates:
    """A recurrence with the states at its chunk edges: one call, where a prefix cache would need one call per snapshot.

    Going on from a row with the tokens that follow is going on from the final state of a call on the tokens before it.

    Args:
        op: a recurrence or its name, e.g. `ops.kda` or "kda".
        arrays: its arrays, in the order it takes them.
        scale, initial_state, segment_ids, chunk_size: as in the op.
        implementation: "scan", "xla", "pallas_tpu", or None for the best that applies.

    Returns:
        ChunkStates(o, final_state, states [B, T // chunk_size + 1, HV, K, V]), states in the dtype of the final one (float32).

    Raises:
        ValueError: as the op.
        NotImplementedError: the named implementation does not apply, with the reason.

    Numerics: o and final_state are those of the op. All three can be differentiated; the gradients of "pallas_tpu" are those of "xla".

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> one = jnp.ones((1, 5, 1, 1))
        >>> ops.chunk_states("linear_attention", one, one, one, chunk_size=2).states.ravel().tolist()
        [0.0, 2.0, 4.0]
    """
    spec, inputs = find(op, arrays)
    _validate(spec, inputs, initial_state, segment_ids, chunk_size, implementation)
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(*(x for x in inputs if x is not None)))
    state = _zero_state(inputs, dtype) if initial_state is None else initial_state.astype(dtype)
    inputs = inputs if segment_ids is None else _with_boundaries(inputs, segment_ids)
    T, K = inputs.q.shape[1], inputs.q.shape[-1]
    if inputs.v.size == 0:  # no tokens, no rows, or values without width
        return ChunkStates(jnp.zeros_like(inputs.v), state, jnp.repeat(state[:, None], T // chunk_size + 1, axis=1))
    chosen = choose(spec, inputs, implementation, chunk_size).chosen
    why = "its kernels return no states" if chosen == "pallas_gpu" else "the mesh splits time" if sharding.parts("time", T) > 1 else None
    if chosen.startswith("pallas") and why:
        if implementation is not None:
            raise NotImplementedError(f"{spec.name}: implementation {chosen!r} does not apply: {why}")
        chosen = "xla"
    o, final_state, starts = _RUNNERS[chosen](spec, inputs, scale=scale_of(spec, K, scale), initial_state=state, chunk_size=chunk_size)
    if T % chunk_size == 0:
        starts = jnp.concatenate([starts, final_state[None]])
    return ChunkStates(o.astype(inputs.v.dtype), final_state, jnp.moveaxis(starts, 0, 1))


def _run_scan(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: Array, chunk_size: int) -> tuple[Array, Array, Array]:
    """o, final state and the state before every chunk, the last of which may be partial."""

    def chunk(state, inputs):
        o, end = run_scan(spec, Inputs(*inputs), scale=scale, initial_state=state)
        return end, (o, state)

    T = inputs.q.shape[1]
    n = T // chunk_size
    whole = lambda x: jnp.moveaxis(x[:, : n * chunk_size].reshape(x.shape[0], n, chunk_size, *x.shape[2:]), 1, 0)
    state, (o, starts) = jax.lax.scan(chunk, initial_state, jax.tree.map(whole, tuple(inputs)))
    o = jnp.moveaxis(o, 0, 1).reshape(o.shape[1], -1, *o.shape[3:])
    if T % chunk_size == 0:
        return o, state, starts
    end, (rest, start) = chunk(state, jax.tree.map(lambda x: x[:, n * chunk_size :], tuple(inputs)))
    return jnp.concatenate([o, rest], axis=1), end, jnp.concatenate([starts, start[None]])


def _run_xla(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: Array, chunk_size: int) -> tuple[Array, Array, Array]:
    del spec
    return chunkwise_states(*inputs, scale=scale, initial_state=initial_state, chunk_size=chunk_size)


def _run_pallas_tpu(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: Array, chunk_size: int) -> tuple[Array, Array, Array]:
    from pallas_kernels import tpu

    def kernel(inputs: Inputs, state: Array) -> tuple[Array, Array, Array]:
        o, end, starts = tpu.chunk_states(*one_dtype(inputs), state, scale=scale, chunk_size=chunk_size)
        return o, end, jnp.moveaxis(starts, 1, 0)

    def local(_, *parts: Array | None) -> tuple[Array, Array, Array]:
        *parts, state = parts
        run = jax.custom_vjp(kernel)
        run.defvjp(lambda *args: (kernel(*args), args), lambda args, d: jax.vjp(in_jnp, *args)[1](d))
        return run(Inputs(*parts), state)

    def in_jnp(inputs: Inputs, state: Array) -> tuple[Array, Array, Array]:
        o, end, starts = _run_xla(spec, inputs, scale=scale, initial_state=state, chunk_size=chunk_size)
        return o.astype(jnp.result_type(*inputs[:3])), end, starts

    tokens, *_, states = names = names_of(inputs)
    with tpu_only(spec.name):
        return sharding.local_map(local, (*inputs, initial_state), names, (tokens, states, (None, *states)))


_RUNNERS = {"scan": _run_scan, "xla": _run_xla, "pallas_tpu": _run_pallas_tpu}
