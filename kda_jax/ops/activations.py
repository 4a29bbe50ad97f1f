"""Gated activations of feed-forward layers, beside SwiGLU (`ops.experts.swiglu`)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Situ:
    """f(gate, up) = [beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)].

    Kimi K3, arXiv 2607.24653, section 2.3: SwiGLU whose two factors are bounded, |f| <= beta * linear_beta; both bounds at infinity give
    silu(gate) * up. The sigmoid takes the gate itself, not the capped one. A value with equality, so that modules which hold it compare.

    Args:
        beta: bound of the gate's branch.
        linear_beta: bound of the other one.

    Numerics: float32 (float64 for float64 inputs), rounded once.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> round(float(ops.Situ(4.0, 25.0)(jnp.array([1.0]), jnp.array([2.0]))[0]), 4)
        1.4294
    """

    beta: float
    linear_beta: float

    def __call__(self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        wide = jnp.promote_types(gate.dtype, jnp.float32)
        g, u = gate.astype(wide), up.astype(wide)
        bounded = self.beta * jnp.tanh(g / self.beta) * jax.nn.sigmoid(g)
        return (bounded * self.linear_beta * jnp.tanh(u / self.linear_beta)).astype(gate.dtype)
