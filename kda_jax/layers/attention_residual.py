"""Attention Residuals: the stream between layers is a bank of finished sums and one growing sum, which every sublayer mixes anew."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.ops.depth_attention import attention_residual


class DepthStream(NamedTuple):
    """What takes the place of the residual stream x [B, T, D], in shapes that do not change along depth, so that layers can be scanned.

    stream = DepthStream.start(x, rows=source_rows(sublayers, block))
    h = mix(stream)                                # `AttentionResidual`, once per sublayer
    stream = stream.enter(block).add(f(norm(h)))   # f is the sublayer
    """

    prefix: Float[Array, "*batch D"]
    """Sum of the sublayers of the block that is not finished."""
    bank: Float[Array, "N *batch D"]
    """The embedding and the sums of finished blocks; each row is written once."""
    count: Int[Array, ""]
    """Rows of the bank in use."""
    sublayer: Int[Array, ""]
    """Number of the sublayer that comes next, from 0."""

    @classmethod
    def start(cls, x: Float[Array, "*batch D"], rows: int) -> "DepthStream":
        """Before the first sublayer: an empty bank of `rows` rows, and the embedding as the prefix."""
        zero = jnp.zeros((), jnp.int32)
        return cls(x, jnp.broadcast_to(jnp.zeros_like(x), (rows, *x.shape)), zero, zero)

    def enter(self, block: int) -> "DepthStream":
        """The stream inside the next sublayer: where it opens a block, the prefix goes to the bank and begins again at zero.

        Args:
            block: sublayers per block; 1 is full Attention Residuals, in which every sublayer's output is a source of its own.
        """
        opens = self.sublayer % block == 0
        row = jnp.minimum(self.count, self.bank.shape[0] - 1)  # a full bank has nothing more to open
        old = jax.lax.dynamic_index_in_dim(self.bank, row, keepdims=False)
        bank = jax.lax.dynamic_update_index_in_dim(self.bank, jnp.where(opens, self.prefix, old), row, 0)
        return DepthStream(jnp.where(opens, 0, self.prefix), bank, self.count + opens, self.sublayer)

    def add(self, y: Float[Array, "*batch D"]) -> "DepthStream":
        """The stream after a sublayer whose output is `y`."""
        return self._replace(prefix=self.prefix + y, sublayer=self.sublayer + 1)


def source_rows(sublayers: int, block: int) -> int:
    """Rows of the bank that a stack of `sublayers` fills: one per block opened. The live prefix is one source more.

    Example:
        >>> source_rows(2 * 93, 2 * 12) + 1  # Kimi K3: 93 layers in blocks of 12
        9
    """
    return -(-sublayers // block)


class AttentionResidual(nnx.Module):
    """h = sum_i softmax_i(query . RMSNorm(v_i)) v_i over the sources of a `DepthStream` (arXiv 2603.15031); see `ops.attention_residual`.

    The query begins at zero, at which h is the mean of the sources.

    Args:
        features: width D of the sources.
        eps: of the keys' norm.

    Numerics: the mix is float32 and rounded to the stream's dtype once, before the next norm reads it, as the released code does
        (architecture of Kimi K3: the prefix is a running sum in the stream's dtype).
    """

    def __init__(self, features: int, *, eps: float = 1e-5):
        self.query = nnx.Param(jnp.zeros(features), axes=("embed",))
        self.scale = nnx.Param(jnp.ones(features), axes=("embed",))
        self.eps = eps

    def __call__(self, stream: DepthStream) -> Float[Array, "*batch D"]:
        return attention_residual(stream.bank, stream.prefix, self.query[...], self.scale[...], count=stream.count, eps=self.eps)
