"""The short convolution before a recurrence."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.ops.short_conv import ConvOutput, short_conv


class ShortConv(nnx.Module):
    """Depthwise causal convolution over `kernel_size` tokens, then SiLU; see `ops.short_conv`.

    The kernel is [channels, kernel_size], the last tap is the current token; kernel and bias ~ U(+-1/sqrt(kernel_size)).

    Args:
        channels: D.
        kernel_size: W, 4 in all released models.
        use_bias: Mamba-2 has a bias, the delta rules have none.
    """

    def __init__(self, channels: int, kernel_size: int, *, use_bias: bool = False, rngs: nnx.Rngs):
        def uniform(shape, axes):
            bound = 1 / math.sqrt(kernel_size)
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound), axes=axes)

        self.kernel = uniform((channels, kernel_size), ("heads", None))
        self.bias = uniform((channels,), ("heads",)) if use_bias else None

    @property
    def channels(self) -> int:
        return self.kernel.shape[0]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        history: Float[Array, "B W1 D"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> ConvOutput:
        """y [B, T, D] and the history [B, W-1, D] for the next call."""
        bias = None if self.bias is None else self.bias[...]
        return short_conv(x, self.kernel[...], bias, initial_state=history, segment_ids=segment_ids)


def convolve(
    convs: Sequence[ShortConv], inputs: Sequence[Array], history: Float[Array, "B W1 D"] | None, segment_ids: Int[Array, "B T"] | None
) -> tuple[list[Array], Float[Array, "B W1 D"]]:
    """Each input through its own convolution; their histories lie side by side along the channels of one array."""
    ends = [sum(conv.channels for conv in convs[: i + 1]) for i in range(len(convs) - 1)]
    histories = [None] * len(convs) if history is None else jnp.split(history, ends, axis=-1)
    outputs = [conv(x, past, segment_ids) for conv, x, past in zip(convs, inputs, histories, strict=True)]
    return [out.y for out in outputs], jnp.concatenate([out.final_state for out in outputs], axis=-1)
