"""Gated DeltaNet: the delta rule with one decay per head."""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.dispatch import check_logits, run, without_padding
from kda_jax.ops.gates import gdn_gate
from kda_jax.ops.spec import Inputs, OpSpec, RecurrenceOutput, register, share_heads


def gated_delta_rule_step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV"],
    beta: Float[Array, "B HV"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: decay the whole state of each head, read it at k, write the correction, read it at q.

    Args:
        state: [B, HV, K, V], float32.
        q, k, v, g, beta, scale: as in `gated_delta_rule`, for one token.

    Returns:
        the state after the token and the output [B, HV, V], both in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.astype(state.dtype) for x in (q, k, v, g, beta))
    q, k = share_heads(q, v.shape[1]), share_heads(k, v.shape[1])
    state = jnp.exp(g)[..., None, None] * state
    correction = v - jnp.sum(state * k[..., None], axis=-2)
    state = state + (beta[..., None] * k)[..., None] * correction[..., None, :]
    return state, scale * jnp.sum(state * q[..., None], axis=-2)


SPEC = register(
    OpSpec(
        name="gated_delta_rule",
        equation="S_t = exp(g_t) (I - beta k k^T) S_{t-1} + beta k v^T, o = S^T q  (Gated DeltaNet, arXiv 2412.06464, eq. 10)",
        decays=("head",),
        delta=True,
        step=gated_delta_rule_step,
    )
)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """The gated delta rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464, eq. 10).

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Stable while beta |k|^2 <= 2: normalise keys with `l2_norm`.

    Args:
        q, k: [B, T, H, K], any T >= 0.
        v: [B, T, HV, V]; HV a multiple of H, q and k head j serving value heads j r .. j r + r - 1.
        g: [B, T, HV] natural log of the decay of a head's state, <= 0, -inf allowed.
        beta: [B, T, HV] write strength, in [0, 2].
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
        >>> one = jnp.ones((1, 1, 1, 1))
        >>> out = ops.gated_delta_rule(one, one, 2 * one, jnp.log(0.5) * one[..., 0], 0.5 * one[..., 0], initial_state=8 * one)
        >>> float(out.final_state[0, 0, 0, 0])             # 8 decays to 4, and half of 2 - 4 is added
        3.0
    """
    return run(
        SPEC,
        Inputs(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )


@typing.no_type_check
def gated_delta_rule_from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    x: Float[Array, "B T HV"],
    beta_logits: Float[Array, "B T HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """What a Gated DeltaNet layer does between its convolutions and its output norm, in one call (arXiv 2412.06464, section 3.3).

        gated_delta_rule(l2_norm(q), l2_norm(k), v, gdn_gate(x, A_log, dt_bias), sigmoid(beta_logits))

    Args:
        q, k, v: as in `gated_delta_rule`, before the norm.
        x: [B, T, HV] gate logits.
        beta_logits: [B, T, HV]; the sigmoid is taken in float32.
        A_log, dt_bias: [HV], as in `gdn_gate`.
        scale, initial_state, segment_ids, chunk_size, implementation: as in `gated_delta_rule`.

    Returns:
        RecurrenceOutput, as `gated_delta_rule`.

    Raises:
        as `gated_delta_rule` and `gdn_gate`.

    Numerics: a kernel that normalises by itself does so after its products and rounds nothing; elsewhere the normalised q and k are
        rounded to their dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> one = jnp.ones((1, 1, 1, 1))
        >>> zero = jnp.zeros((1, 1, 1))
        >>> out = ops.gated_delta_rule_from_logits(one, one, 2 * one, zero, zero, zero[0, 0], zero[0, 0], initial_state=8 * one)
        >>> round(float(out.final_state[0, 0, 0, 0]), 4)   # softplus(0) = log 2: 8 decays to 4, and half of 2 - 4 is added
        3.0
    """
    logits = Inputs(q, k, v, x, beta_logits)
    check_logits(SPEC, logits, dict(A_log=A_log, dt_bias=dt_bias), initial_state, segment_ids, chunk_size, implementation)
    q, k, v, x, beta_logits = without_padding(logits, segment_ids)
    g = gdn_gate(x, A_log, dt_bias)
    return run(
        SPEC,
        Inputs(q, k, v, g, jax.nn.sigmoid(beta_logits.astype(g.dtype))),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
        normalize=True,
    )
