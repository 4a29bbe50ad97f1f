"""DeltaNet: write the correction instead of the value."""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.dispatch import check_logits, run, without_padding
from kda_jax.ops.spec import Inputs, OpSpec, RecurrenceOutput, register, share_heads


def delta_rule_step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    beta: Float[Array, "B HV"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: read the state at k, write the fraction beta of the correction, read it at q.

    Args:
        state: [B, HV, K, V], float32.
        q, k, v, beta, scale: as in `delta_rule`, for one token.

    Returns:
        the state after the token and the output [B, HV, V], both in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, beta = (x.astype(state.dtype) for x in (q, k, v, beta))
    q, k = share_heads(q, v.shape[1]), share_heads(k, v.shape[1])
    correction = v - jnp.sum(state * k[..., None], axis=-2)
    state = state + (beta[..., None] * k)[..., None] * correction[..., None, :]
    return state, scale * jnp.sum(state * q[..., None], axis=-2)


SPEC = register(
    OpSpec(
        name="delta_rule",
        equation="S_t = (I - beta k k^T) S_{t-1} + beta k v^T, o = S^T q  (DeltaNet, arXiv 2406.06484, eq. 2)",
        decays=("none",),
        delta=True,
        step=delta_rule_step,
    )
)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """The delta rule of DeltaNet (Yang et al. 2024, arXiv 2406.06484; Widrow and Hoff 1960).

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T        o_t = scale S_t^T q_t

    Stable while beta |k|^2 <= 2: with keys that are not normalised the recurrence itself diverges, in any precision.
    Normalise them with `l2_norm`.

    Args:
        q, k: [B, T, H, K], any T >= 0.
        v: [B, T, HV, V]; HV a multiple of H, q and k head j serving value heads j r .. j r + r - 1.
        beta: [B, T, HV] write strength, in [0, 2]; above 1 the transition has negative eigenvalues.
        scale: of the output; K ** -0.5 if None.
        initial_state: [B, HV, K, V] state before the row's first sequence; zeros if None.
        segment_ids: [B, T] integers; a new id starts a new sequence, see `ops.segments`.
        chunk_size: tokens per chunk of the chunkwise form, a power of two.
        implementation: "scan", "xla", "pallas_tpu", "pallas_gpu", or None for the best that applies.

    Returns:
        RecurrenceOutput(o [B, T, HV, V] in v's dtype, final_state [B, HV, K, V] float32, of the row's last sequence).

    Raises:
        ValueError: an argument has the wrong shape, or the implementation is unknown.
        NotImplementedError: the named implementation does not apply; the message says why.

    Numerics: float32 inside whatever the inputs' dtype (float64 for float64).

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> k = jnp.ones((1, 2, 1, 1))                     # the same key twice
        >>> v = jnp.array([3.0, 7.0]).reshape(1, 2, 1, 1)
        >>> ops.delta_rule(k, k, v, jnp.ones((1, 2, 1))).o.ravel().tolist()  # the latest value, not the sum
        [3.0, 7.0]
    """
    return run(
        SPEC,
        Inputs(q, k, v, None, beta),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )


@typing.no_type_check
def delta_rule_from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    beta_logits: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """What a DeltaNet layer does between its convolutions and its output norm, in one call (arXiv 2406.06484, section 3.3).

        delta_rule(l2_norm(q), l2_norm(k), v, sigmoid(beta_logits))

    Args:
        q, k, v: as in `delta_rule`, before the norm.
        beta_logits: [B, T, HV]; the sigmoid is taken in float32.
        scale, initial_state, segment_ids, chunk_size, implementation: as in `delta_rule`.

    Returns:
        RecurrenceOutput, as `delta_rule`.

    Raises:
        as `delta_rule`.

    Numerics: a kernel that normalises by itself does so after its products and rounds nothing; elsewhere the normalised q and k are
        rounded to their dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> k = jnp.full((1, 2, 1, 1), 5.0)                # any length: keys are normalised
        >>> v = jnp.array([3.0, 7.0]).reshape(1, 2, 1, 1)
        >>> ops.delta_rule_from_logits(k, k, v, jnp.zeros((1, 2, 1))).o.ravel().round(4).tolist()  # beta = 1/2
        [1.5, 4.25]
    """
    logits = Inputs(q, k, v, None, beta_logits)
    check_logits(SPEC, logits, {}, initial_state, segment_ids, chunk_size, implementation)
    q, k, v, _, beta_logits = without_padding(logits, segment_ids)
    beta = jax.nn.sigmoid(beta_logits.astype(jnp.promote_types(jnp.float32, beta_logits.dtype)))
    return run(
        SPEC,
        Inputs(q, k, v, None, beta),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
        normalize=True,
    )
