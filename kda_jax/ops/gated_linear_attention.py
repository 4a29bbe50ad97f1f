"""Linear attention that forgets: Mamba-2 / SSD with one decay per head, GLA with one per key channel."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.dispatch import run
from kda_jax.ops.spec import Inputs, OpSpec, RecurrenceOutput, register, share_heads


def gated_linear_attention_step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV *K"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: decay the state, add k v^T, read it at q.

    Args:
        state: [B, HV, K, V], float32.
        q, k, v, g, scale: as in `gated_linear_attention`, for one token; g [B, HV] or [B, HV, K].

    Returns:
        the state after the token and the output [B, HV, V], both in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g = (x.astype(state.dtype) for x in (q, k, v, g))
    q, k = share_heads(q, v.shape[1]), share_heads(k, v.shape[1])
    decay = jnp.exp(g if g.ndim == 3 else g[..., None])
    state = decay[..., None] * state + k[..., None] * v[..., None, :]
    return state, scale * jnp.sum(state * q[..., None], axis=-2)


SPEC = register(
    OpSpec(
        name="gated_linear_attention",
        equation="S_t = Diag(exp g_t) S_{t-1} + k v^T, o = S^T q  (GLA, arXiv 2312.06635, eq. 3; per head: Mamba-2, arXiv 2405.21060)",
        decays=("head", "channel"),
        delta=False,
        step=gated_linear_attention_step,
    )
)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def gated_linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV *K"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """Gated linear attention (GLA, arXiv 2312.06635, eq. 3) and the state space dual of Mamba-2 (arXiv 2405.21060).

        S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Mamba-2 is q = C, k = B, v = Delta x, g = Delta A with one decay per head and scale = 1.

    Args:
        q, k: [B, T, H, K], any T >= 0.
        v: [B, T, HV, V]; HV a multiple of H, q and k head j serving value heads j r .. j r + r - 1.
        g: [B, T, HV] (one decay per head) or [B, T, HV, K] (one per key channel), natural log, <= 0, -inf allowed.
        scale: of the output; K ** -0.5 if None.
        initial_state: [B, HV, K, V] state before the row's first sequence; zeros if None.
        segment_ids: [B, T] integers; a new id starts a new sequence, see `ops.segments`.
        chunk_size: tokens per chunk of the chunkwise form, a power of two.
        implementation: "scan", "xla", "pallas_tpu", "pallas_gpu", or None for the best that applies.

    Returns:
        RecurrenceOutput(o [B, T, HV, V] in v's dtype, final_state [B, HV, K, V] float32, of the row's last sequence).

    Raises:
        ValueError: an argument has the wrong shape, a gate that can be seen is positive, or the implementation is unknown.
        NotImplementedError: the named implementation does not apply; the message says why.

    Numerics: float32 inside whatever the inputs' dtype (float64 for float64).

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> one = jnp.ones((1, 3, 1, 1))
        >>> ops.gated_linear_attention(one, one, one, jnp.log(0.5) * one[..., 0]).o.ravel().tolist()
        [1.0, 1.5, 1.75]
    """
    return run(
        SPEC,
        Inputs(q, k, v, g, None),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )
