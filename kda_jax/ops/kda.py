"""Kimi Delta Attention: the delta rule with a decay of its own for every key channel."""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax import sharding
from kda_jax.ops.dispatch import check_logits, choose, names_of, one_dtype, run, scale_of, tpu_only, without_padding
from kda_jax.ops.gates import kda_gate
from kda_jax.ops.norms import l2_norm
from kda_jax.ops.segments import segments
from kda_jax.ops.spec import Inputs, OpSpec, RecurrenceOutput, register, share_heads


def kda_step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV K"],
    beta: Float[Array, "B HV"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: decay every row of the state, read it at k, write the correction, read it at q.

    Args:
        state: [B, HV, K, V], float32.
        q, k, v, g, beta, scale: as in `kda`, for one token.

    Returns:
        the state after the token and the output [B, HV, V], both in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.astype(state.dtype) for x in (q, k, v, g, beta))
    q, k = share_heads(q, v.shape[1]), share_heads(k, v.shape[1])
    state = jnp.exp(g)[..., None] * state
    correction = v - jnp.sum(state * k[..., None], axis=-2)
    state = state + (beta[..., None] * k)[..., None] * correction[..., None, :]
    return state, scale * jnp.sum(state * q[..., None], axis=-2)


SPEC = register(
    OpSpec(
        name="kda",
        equation="S_t = (I - beta k k^T) Diag(exp g_t) S_{t-1} + beta k v^T, o = S^T q  (Kimi Linear, arXiv 2510.26692, eq. 1)",
        decays=("channel",),
        delta=True,
        step=kda_step,
    )
)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, eq. 1).

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Decay, then read, then write; the output reads the state after the write. The recurrence is stable while
    beta |k|^2 <= 2: normalise keys with `l2_norm`.

    Args:
        q, k: [B, T, H, K], any T >= 0.
        v: [B, T, HV, V]; HV a multiple of H, q and k head j serving value heads j r .. j r + r - 1.
        g: [B, T, HV, K] natural log of the decay of each row of the state, <= 0, -inf allowed.
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

    Numerics: float32 inside whatever the inputs' dtype (float64 for float64). Nothing is clamped; see `ops.decay`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kda_jax import ops
        >>> q = k = v = jax.nn.one_hot(jnp.arange(4), 8)[None, :, None, :]      # [B=1, T=4, H=1, K=8]
        >>> out = ops.kda(q, k, v, g=jnp.zeros_like(q), beta=jnp.ones((1, 4, 1)), scale=1.0)
        >>> out.o.shape, out.final_state.shape
        ((1, 4, 1, 8), (1, 1, 8, 8))
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
def kda_from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    x: Float[Array, "B T HV K"],
    beta_logits: Float[Array, "B T HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """What a KDA layer does between its convolutions and its output norm, in one call.

        kda(l2_norm(q), l2_norm(k), v, kda_gate(x, A_log, dt_bias, lower_bound), sigmoid(beta_logits))

    Args:
        q, k, v: as in `kda`, before the norm.
        x: [B, T, HV, K] gate logits.
        beta_logits: [B, T, HV]; the sigmoid is taken in float32.
        A_log, dt_bias, lower_bound: as in `kda_gate`.
        scale, initial_state, segment_ids, chunk_size, implementation: as in `kda`.

    Returns:
        RecurrenceOutput, as `kda`.

    Raises:
        as `kda` and `kda_gate`.
    """
    logits = Inputs(q, k, v, x, beta_logits)
    check_logits(SPEC, logits, dict(A_log=A_log, dt_bias=dt_bias), initial_state, segment_ids, chunk_size, implementation)
    here = x.size and sharding.parts("time", x.shape[1]) == 1  # the fused kernel has no summary of a segment
    if here and choose(SPEC, logits, implementation, chunk_size).chosen == "pallas_tpu":
        return _fused(logits, (A_log, dt_bias, lower_bound), scale, initial_state, segment_ids, chunk_size)
    q, k, v, x, beta_logits = without_padding(logits, segment_ids)
    g = kda_gate(x, A_log, dt_bias, lower_bound)
    beta = jax.nn.sigmoid(beta_logits.astype(g.dtype))
    return kda(
        l2_norm(q),
        l2_norm(k),
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def _fused(logits: Inputs, gate, scale, initial_state, segment_ids, chunk_size) -> RecurrenceOutput:
    """`kda_from_logits` as one TPU kernel; `logits` holds x and beta_logits in the places of g and beta."""
    from pallas_kernels.tpu import NO_TOKEN, chunk_kda_from_logits

    A_log, dt_bias, lower_bound = gate
    reset = None if segment_ids is None else segments(segment_ids).reset
    logits = one_dtype(without_padding(logits, segment_ids, NO_TOKEN))
    options = dict(scale=scale_of(SPEC, logits.q.shape[-1], scale), chunk_size=chunk_size, lower_bound=lower_bound)

    def local(_, *args):
        *args, reset = args
        return chunk_kda_from_logits(*args, reset=reset, **options)

    *names, state = names_of(logits)
    args = *logits, A_log, dt_bias, initial_state, reset
    with tpu_only("kda_from_logits"):
        out = sharding.local_map(local, args, (*names, ("heads",), ("heads", None), state, ("batch", "time")), (names[2], state))
    return RecurrenceOutput(*out)
