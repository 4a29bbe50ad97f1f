"""Normalisations: all sums in float32 (float64 for float64 inputs), one rounding where the released models round."""

import typing
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

OutputActivation = Literal["sigmoid", "silu"]


def rms_norm(x: Float[Array, "*batch D"], weight: Float[Array, "D"], eps: float = 1e-5) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, then times `weight` (not 1 + weight).

    Zhang & Sennrich, arXiv 1910.07467, eq. 4, with the rounding order of the released Kimi models.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean, inside the root.

    Returns:
        [..., D] in x's dtype.
    """
    return _rms_normalize(x, eps).astype(x.dtype) * weight.astype(x.dtype)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def gated_rms_norm(
    x: Float[Array, "*batch D"],
    gate: Float[Array, "*batch D"],
    weight: Float[Array, "D"],
    eps: float = 1e-5,
    activation: OutputActivation = "sigmoid",
) -> Float[Array, "*batch D"]:
    """RMS norm, then weight, then `activation(gate)`: all in float32 with one rounding at the end.

    The output stage of Gated DeltaNet (arXiv 2412.06464, "silu") and Kimi Delta Attention (arXiv 2510.26692 section 4, "sigmoid").
    The activation is part of the trained model: the two are not interchangeable.

    Args:
        x: [..., D], a recurrence's output per head.
        gate: [..., D] logits.
        weight: [D].
        eps: added to the mean, inside the root.
        activation: "sigmoid" or "silu".

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: unknown activation.
    """
    activations = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}
    if activation not in activations:
        raise ValueError(f"activation is {activation!r}; expected one of {sorted(activations)}")
    y = _rms_normalize(x, eps)
    return (y * weight.astype(y.dtype) * activations[activation](gate.astype(y.dtype))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, "D"], bias: Float[Array, "D"], eps: float = 1e-5
) -> Float[Array, "*batch D"]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32 with one rounding at the end.

    Ba, Kiros & Hinton, arXiv 1607.06450, as GPT-2 uses it.

    Args:
        x: [..., D].
        weight, bias: [D].
        eps: added to the variance, inside the root.

    Returns:
        [..., D] in x's dtype.
    """
    wide = _widen(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (y * weight.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


def l2_norm(x: Float[Array, "*batch D"], eps: float = 1e-6) -> Float[Array, "*batch D"]:
    """x / sqrt(sum(x^2) + eps) over the last axis.

    The eps is added to the *sum* inside the root: an RMS norm would add D times as much, and max(|x|, eps) a million times less
    for small x. Both differ where it matters, at keys close to zero. The gradient at x = 0 is finite, 1/sqrt(eps).

    Args:
        x: [..., D].
        eps: added to the sum, inside the root.

    Returns:
        [..., D] in x's dtype.
    """
    wide = _widen(x)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def _rms_normalize(x: Array, eps: float) -> Array:
    wide = _widen(x)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
