"""Linear attention: all keys and values folded into one sum."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.dispatch import run
from kda_jax.ops.spec import Inputs, OpSpec, RecurrenceOutput, register, share_heads


def linear_attention_step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: add k v^T to the state, read it at q.

    Args:
        state: [B, HV, K, V], float32.
        q, k, v, scale: as in `linear_attention`, for one token and without `normalize`.

    Returns:
        the state after the token and the output [B, HV, V], both in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.astype(state.dtype) for x in (q, k, v))
    q, k = share_heads(q, v.shape[1]), share_heads(k, v.shape[1])
    state = state + k[..., None] * v[..., None, :]
    return state, scale * jnp.sum(state * q[..., None], axis=-2)


SPEC = register(
    OpSpec(
        name="linear_attention",
        equation="S_t = S_{t-1} + k v^T, o = S^T q  (Katharopoulos et al. 2020, arXiv 2006.16236, eqs. 16-20)",
        decays=("none",),
        delta=False,
        step=linear_attention_step,
    )
)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> RecurrenceOutput:
    """Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236, eqs. 16-20), after the feature map.

        S_t = S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
        with normalize:  z_t = z_{t-1} + k_t,  o_t = S_t^T q_t / (z_t . q_t)

    Args:
        q, k: [B, T, H, K], any T >= 0, after the feature map; with `normalize` z . q should be positive.
        v: [B, T, HV, V]; HV a multiple of H, q and k head j serving value heads j r .. j r + r - 1.
        normalize: divide by z . q (0 where it is 0). The sum of keys z is carried as one more column of v, so states are
            [B, HV, K, V + 1]; the scale cancels.
        scale: of the output; K ** -0.5 if None.
        initial_state: [B, HV, K, V (+ 1 with normalize)] state before the row's first sequence; zeros if None.
        segment_ids: [B, T] integers; a new id starts a new sequence, see `ops.segments`.
        chunk_size: tokens per chunk of the chunkwise form, a power of two.
        implementation: "scan", "xla", "pallas_tpu", "pallas_gpu", or None for the best that applies.

    Returns:
        RecurrenceOutput(o [B, T, HV, V] in v's dtype, final_state [B, HV, K, V (+ 1 with normalize)] float32, of the row's last sequence).

    Raises:
        ValueError: an argument has the wrong shape, or the implementation is unknown.
        NotImplementedError: the named implementation does not apply; the message says why.

    Numerics: float32 inside whatever the inputs' dtype (float64 for float64).

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> one = jnp.ones((1, 3, 1, 1))
        >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
        >>> ops.linear_attention(one, one, v, normalize=True).o.ravel().tolist()   # running mean
        [1.0, 1.5, 3.0]
    """
    values = v
    if normalize:
        values = v.astype(jnp.promote_types(jnp.float32, v.dtype))  # the ratio is rounded once, not its two parts
        values = jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)
    out = run(
        SPEC,
        Inputs(q, k, values, None, None),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return out._replace(o=_ratio(out.o).astype(v.dtype)) if normalize else out


def _ratio(o: Array) -> Array:
    """o [..., V + 1] -> its first V columns over the last, 0 where that is 0."""
    numerator, denominator = o[..., :-1], o[..., -1:]
    seen = denominator != 0
    return jnp.where(seen, numerator / jnp.where(seen, denominator, 1), 0)
