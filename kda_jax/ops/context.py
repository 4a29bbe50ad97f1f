"""A sequence split over devices: what a segment does to the state before it is one affine map.

    S_end = M S_start + S_ext        o_t = o_ext_t + (scale M_t^T q_t)^T S_start        M_t = product of the transitions up to t, M = M_T

S_ext and o_ext come from the recurrence started at zero (Kimi Linear, arXiv 2510.26692, section 6; the same composition splits a long
sequence over the cores of one chip). With the delta rule, M_t^T q_t is the output of the same recurrence with values 0 started at the
identity: K more columns of values in the one call, so that its kernels and its backward serve as they are. Without it M_t is diagonal,
the decay so far. One all-gather of (S_ext, M) then lets every device compose what came before its segment.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.spec import Inputs
from kda_jax.sharding import Shards


def in_segments(
    run: Callable[..., tuple[Array, Array]], shards: Shards, inputs: Inputs, *, scale: float, initial_state: Float[Array, "B HV K V"]
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Outputs of this device's segment, and the state after the last segment.

    Args:
        run: (inputs, scale=, initial_state=) -> (o, final state), the recurrence on one device.
        shards: of the whole, split over "time".
        inputs: of this segment.
        initial_state: before the first segment, the same everywhere.

    Numerics: summaries and their composition have the dtype of the state.
    """
    parts = _summary_with_delta if inputs.beta is not None else _summary
    o, reach, S_ext, M = parts(run, inputs, scale, initial_state)
    index, V = shards.index("time"), S_ext.shape[-1]

    def compose(carry, segment):
        S, start = carry
        number, summary = segment
        S_ext, M = summary[..., :V], summary[..., V:]
        return (_apply(M, S) + S_ext, jnp.where(number == index, S, start)), None

    summary = jnp.concatenate([S_ext, jnp.broadcast_to(M, (*S_ext.shape[:-1], M.shape[-1]))], axis=-1)
    segments = jnp.arange(shards.count("time")), shards.gather(summary, "time")
    (end, start), _ = jax.lax.scan(compose, (initial_state, initial_state), segments)
    return o + jnp.einsum("bthk,bhkv->bthv", reach, start, precision="highest"), end


def _summary_with_delta(run, inputs: Inputs, scale, like) -> tuple[Array, Array, Array, Array]:
    """o_ext, scale M_t^T q_t, S_ext [B, HV, K, V], M [B, HV, K, K]."""
    B, HV, K, V = like.shape
    v = inputs.v
    wide = jnp.concatenate([v, jnp.zeros((*v.shape[:3], K), v.dtype)], axis=-1)
    identity = jnp.broadcast_to(jnp.eye(K, dtype=like.dtype), (B, HV, K, K))
    o, end = run(inputs._replace(v=wide), scale=scale, initial_state=jnp.concatenate([jnp.zeros_like(like), identity], axis=-1))
    o = o.astype(like.dtype)
    return o[..., :V], o[..., V:], end[..., :V], end[..., V:]


def _summary(run, inputs: Inputs, scale, like) -> tuple[Array, Array, Array, Array]:
    """The same without the delta rule; M [B, HV, K, 1] or [B, HV, 1, 1] is the diagonal."""
    q, _, v, g, _ = inputs
    o, end = run(inputs, scale=scale, initial_state=jnp.zeros_like(like))
    reach = scale * jnp.repeat(q.astype(like.dtype), v.shape[2] // q.shape[2], axis=2)
    if g is None:
        return o.astype(like.dtype), reach, end, jnp.ones((*like.shape[:2], 1, 1), like.dtype)
    g = g.astype(like.dtype)
    decay = jnp.exp(jnp.cumsum(g[..., None] if g.ndim == 3 else g, axis=1))
    return o.astype(like.dtype), reach * decay, end, decay[:, -1, :, :, None]


def _apply(M: Array, S: Array) -> Array:
    """M S for a matrix or a diagonal M."""
    return jnp.matmul(M, S, precision="highest") if M.shape[-1] > 1 else M * S
