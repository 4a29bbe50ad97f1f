"""Normalisation layers: a scale around the functions of `ops.norms`."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kda_jax.ops.norms import OutputActivation, gated_rms_norm, layer_norm, rms_norm


class RMSNorm(nnx.Module):
    """x / rms(x), rounded to x's dtype, times a learned scale that begins at 1; see `ops.rms_norm`.

    Args:
        features: width D of the last axis.
        eps: added to the mean of squares.
        axis: logical name of that axis.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, axis: str | None = None):
        self.scale = nnx.Param(jnp.ones(features), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale[...], self.eps)


class GatedRMSNorm(nnx.Module):
    """RMS norm, then scale, then activation(gate), in float32 throughout; see `ops.gated_rms_norm`.

    Args:
        features: width D of the last axis: of one head, whose scale all heads share.
        activation: "sigmoid" (KDA) or "silu" (Gated DeltaNet).
        eps: added to the mean of squares.
    """

    def __init__(self, features: int, *, activation: OutputActivation, eps: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(features), axes=(None,))
        self.activation = activation
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"], gate: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return gated_rms_norm(x, gate, self.scale[...], self.eps, self.activation)


class LayerNorm(nnx.Module):
    """Zero mean, unit variance, learned scale (1) and bias (0), in float32 throughout; see `ops.layer_norm`.

    Args:
        features: width D of the last axis.
        eps: added to the variance.
        axis: logical name of that axis.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, axis: str | None = None):
        self.scale = nnx.Param(jnp.ones(features), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros(features), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)
