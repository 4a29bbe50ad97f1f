"""DeltaNet: before writing a value, remove what the state already answers to that key."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import ops
from kda_jax.layers.caches import MixerOutput, RecurrentCache
from kda_jax.layers.initializers import linear
from kda_jax.layers.norms import RMSNorm
from kda_jax.layers.short_conv import ShortConv, convolve


class DeltaNet(nnx.Module):
    """S_t = (I - beta k k^T) S_{t-1} + beta k v^T (Schlag et al. 2021, arXiv 2102.11174; Yang et al. 2024, arXiv 2406.06484).

    q, k, v: projection, short convolution, SiLU; q and k then L2-normalised, which keeps the recurrence stable.
    beta = sigmoid per head. Output: RMS norm per head, projection.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K of queries and keys.
        head_v_dim: V of values; head_dim if None.
        short_conv_kernel_size: W.
        rms_norm_eps: of the output norm.
        initializer_range: standard deviation of the projections.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        head_v_dim: int | None = None,
        short_conv_kernel_size: int = 4,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        keys, values = num_heads * head_dim, num_heads * self.head_v_dim
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.q_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.k_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.v_proj = linear(hidden_size, values, ("embed", "heads"), split=(self.head_v_dim,), **init)
        self.q_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.k_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.v_conv1d = ShortConv(values, short_conv_kernel_size, rngs=rngs)
        self.b_proj = linear(hidden_size, num_heads, ("embed", "heads"), **init)
        self.o_norm = RMSNorm(self.head_v_dim, eps=rms_norm_eps)
        self.o_proj = linear(values, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: RecurrentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        state, history = (None, None) if cache is None else cache
        (q, k, v), history = self.project(x, history, segment_ids)
        o, state = ops.delta_rule_from_logits(q, k, v, self.b_proj(x), initial_state=state, segment_ids=segment_ids)
        return MixerOutput(self.output(o), None if cache is None else RecurrentCache(state, history))

    def project(
        self, x: Float[Array, "B T D"], history: Float[Array, "B W1 P"] | None, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[list[Float[Array, "B T H _"]], Float[Array, "B W1 P"]]:
        """q, k [B, T, H, K] and v [B, T, H, V] after convolution and SiLU, and the history for the next call."""
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        qkv, history = convolve(convs, (self.q_proj(x), self.k_proj(x), self.v_proj(x)), history, segment_ids)
        return [y.reshape(*y.shape[:2], self.num_heads, -1) for y in qkv], history

    def output(self, o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        return self.o_proj(self.o_norm(o).reshape(*o.shape[:2], -1))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> RecurrentCache:
        """The empty state (float32) and convolution history (`dtype`); `max_len` does not matter."""
        del max_len
        width = self.q_conv1d.kernel.shape[1]
        channels = self.num_heads * (2 * self.head_dim + self.head_v_dim)
        state = jnp.zeros((batch, self.num_heads, self.head_dim, self.head_v_dim), jnp.float32)
        return RecurrentCache(state, jnp.zeros((batch, width - 1, channels), dtype))
