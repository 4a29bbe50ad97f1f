"""Gates: from logits to natural-log decays, in float32."""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.ops.spec import need_floats


@typing.no_type_check
def kda_gate(
    x: Float[Array, "B T HV K"], A_log: Float[Array, " HV"], dt_bias: Float[Array, "HV K"], lower_bound: float | None = None
) -> Float[Array, "B T HV K"]:
    """Log decay of Kimi Delta Attention, one per head and key channel.

        g = -exp(A_log) softplus(x + dt_bias)                  Kimi Linear, arXiv 2510.26692, section 4
        g = lower_bound sigmoid(exp(A_log) (x + dt_bias))      Kimi K3, arXiv 2607.24653, eq. 5

    The two are different functions that a checkpoint was trained with, not a speed option.

    Args:
        x: [B, T, HV, K] logits, any float dtype.
        A_log: [HV], one scalar per head.
        dt_bias: [HV, K].
        lower_bound: None for the softplus form, or the bound in [-5, 0) that makes every decay > exp(lower_bound).

    Returns:
        g [B, T, HV, K], float32 (float64 for float64 logits), in (-inf, 0] or (lower_bound, 0).

    Raises:
        ValueError: a shape does not fit, or lower_bound is outside [-5, 0).

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> zero = jnp.zeros((1, 1, 1, 1))
        >>> round(float(ops.kda_gate(zero, jnp.zeros(1), jnp.zeros((1, 1)))[0, 0, 0, 0]), 6)
        -0.693147
        >>> float(ops.kda_gate(zero, jnp.zeros(1), jnp.zeros((1, 1)), lower_bound=-5.0)[0, 0, 0, 0])
        -2.5
    """
    _check("kda_gate", x, 4, A_log, dt_bias)
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"kda_gate: lower_bound is {lower_bound}, expected None or a number in [-5, 0)")
    dtype = jnp.promote_types(jnp.float32, x.dtype)
    x = x.astype(dtype) + dt_bias.astype(dtype)
    rate = jnp.exp(A_log.astype(dtype))[:, None]
    return -rate * jax.nn.softplus(x) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * x)


@typing.no_type_check
def gdn_gate(x: Float[Array, "B T HV"], A_log: Float[Array, " HV"], dt_bias: Float[Array, " HV"]) -> Float[Array, "B T HV"]:
    """Log decay of Gated DeltaNet, one per head: g = -exp(A_log) softplus(x + dt_bias) (arXiv 2412.06464, after Mamba-2).

    Args:
        x: [B, T, HV] logits, any float dtype.
        A_log, dt_bias: [HV].

    Returns:
        g [B, T, HV] <= 0, float32 (float64 for float64 logits).

    Raises:
        ValueError: a shape does not fit.
    """
    _check("gdn_gate", x, 3, A_log, dt_bias)
    dtype = jnp.promote_types(jnp.float32, x.dtype)
    return -jnp.exp(A_log.astype(dtype)) * jax.nn.softplus(x.astype(dtype) + dt_bias.astype(dtype))


def _check(name, x, rank, A_log, dt_bias):
    need_floats(name, dict(x=x, A_log=A_log, dt_bias=dt_bias))
    if x.ndim != rank:
        raise ValueError(f"{name}: x has shape {x.shape}, expected {'[B, T, HV, K]' if rank == 4 else '[B, T, HV]'}")
    if A_log.shape != x.shape[2:3]:
        raise ValueError(f"{name}: A_log has shape {A_log.shape}, expected one value per head, {x.shape[2:3]}")
    if dt_bias.shape != x.shape[2:]:
        raise ValueError(f"{name}: dt_bias has shape {dt_bias.shape}, expected {x.shape[2:]}")
