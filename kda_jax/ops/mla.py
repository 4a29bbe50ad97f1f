"""Multi-head latent attention in absorbed form: every head attends to the latent itself."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.attention import attention
from kda_jax.ops.spec import need_floats


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def mla(
    q_latent: Float[Array, "B T H R"],
    q_rope: Float[Array, "B T H P"],
    latent: Float[Array, "B S RP"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    q_index: Int[Array, "B T"] | None = None,
    start: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H R"]:
    """Causal attention whose keys and values are one latent vector per token, shared by all heads.

    DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix B: with q_latent = W_UK^T q_nope the score
    q_nope . (W_UK c_j) + q_rope . k_r,j equals q_latent . c_j + q_rope . k_r,j, so keys and values are never expanded and the
    cache is R + P numbers per token. The caller reads its values with W_UV from the result.

    Args:
        q_latent: [B, T, H, R], queries carried into the latent space.
        q_rope: [B, T, H, P], the part that meets the shared extra key.
        latent: [B, S, R + P], [c | k_r] per token.
        scale: of the scores. It belongs to the unabsorbed head (nope + P dims)**-0.5, so it has no default here.
        segment_ids, q_index, start: as in `ops.attention`.

    Returns:
        [B, T, H, R]: sum_j p_j c_j.

    Raises:
        ValueError: an argument has the wrong shape or dtype.
    """
    need_floats("mla", dict(q_latent=q_latent, q_rope=q_rope, latent=latent))
    for name, x, rank in (("q_latent", q_latent, 4), ("q_rope", q_rope, 4), ("latent", latent, 3)):
        if x.ndim != rank:
            raise ValueError(f"mla: {name} has shape {x.shape}, expected {rank} axes")
    if q_rope.shape[:3] != q_latent.shape[:3]:
        raise ValueError(f"mla: q_rope has shape {q_rope.shape}, expected {q_latent.shape[:3]} and a width")
    R, P = q_latent.shape[-1], q_rope.shape[-1]
    if latent.shape[-1] != R + P:
        raise ValueError(f"latent has shape {latent.shape}; expected a last axis of {R} + {P} = {R + P}")
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    shared = latent[:, :, None]
    # The values are [c | k_r] as well and k_r is dropped from the result: that costs P / (R + P) of the second product and saves
    # a copy of the whole cache.
    return attention(q, shared, shared, scale=scale, segment_ids=segment_ids, q_index=q_index, start=start)[..., :R]
