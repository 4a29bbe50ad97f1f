"""Feed-forward layers."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from kda_jax.layers.initializers import linear
from kda_jax.ops.activations import Situ
from kda_jax.ops.experts import swiglu


class MLP(nnx.Module):
    """GPT-2's c_proj(gelu(c_fc x)) with biases and the tanh form of GELU (Hendrycks & Gimpel, arXiv 1606.08415).

    Args:
        hidden_size: D.
        intermediate_size: F.
        initializer_range: standard deviation of c_fc.
        residual_initializer_range: that of c_proj, 0.02 / sqrt(2 layers) in GPT-2; initializer_range if None.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        initializer_range: float = 0.02,
        residual_initializer_range: float | None = None,
        rngs: nnx.Rngs,
    ):
        std = initializer_range if residual_initializer_range is None else residual_initializer_range
        self.c_fc = linear(hidden_size, intermediate_size, ("embed", "mlp"), use_bias=True, initializer_range=initializer_range, rngs=rngs)
        self.c_proj = linear(intermediate_size, hidden_size, ("mlp", "embed"), use_bias=True, initializer_range=std, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x), no biases (Shazeer, arXiv 2002.05202).

    Args:
        hidden_size: D.
        intermediate_size: F.
        initializer_range: standard deviation of the projections.
    """

    def __init__(self, *, hidden_size: int, intermediate_size: int, initializer_range: float = 0.02, rngs: nnx.Rngs):
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.gate_proj = linear(hidden_size, intermediate_size, ("embed", "mlp"), **init)
        self.up_proj = linear(hidden_size, intermediate_size, ("embed", "mlp"), **init)
        self.down_proj = linear(intermediate_size, hidden_size, ("mlp", "embed"), **init)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class SiTU(SwiGLU):
    """down(situ(gate x, up x)), no biases: SwiGLU with both factors bounded (Kimi K3, arXiv 2607.24653, section 2.3); see `ops.Situ`.

    Args:
        hidden_size: D.
        intermediate_size: F.
        activation: with its two bounds.
        initializer_range: standard deviation of the projections.
    """

    def __init__(self, *, hidden_size: int, intermediate_size: int, activation: Situ, initializer_range: float = 0.02, rngs: nnx.Rngs):
        super().__init__(hidden_size=hidden_size, intermediate_size=intermediate_size, initializer_range=initializer_range, rngs=rngs)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
