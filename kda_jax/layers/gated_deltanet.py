"""Gated DeltaNet: the delta rule with one decay per head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import ops
from kda_jax.layers.caches import MixerOutput, RecurrentCache
from kda_jax.layers.initializers import inverse_softplus_of_time_step, linear, log_uniform
from kda_jax.layers.norms import GatedRMSNorm
from kda_jax.layers.short_conv import ShortConv, convolve


class GatedDeltaNet(nnx.Module):
    """S_t = alpha_t (I - beta k k^T) S_{t-1} + beta k v^T, alpha one scalar per head (Yang et al. 2024, arXiv 2412.06464, eq. 10).

    q, k, v: projection, short convolution, SiLU; q and k then L2-normalised. log alpha = -exp(A_log) softplus(a + dt_bias),
    beta = sigmoid. Output: RMS norm per head, times SiLU of a full-rank gate, projection.

    Args:
        hidden_size: D.
        num_heads: H of queries and keys.
        head_dim: K of queries and keys.
        num_v_heads: HV, a multiple of H: q/k head j serves value heads j r .. j r + r - 1; H if None.
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
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        short_conv_kernel_size: int = 4,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_v_heads, self.head_v_dim = num_v_heads or num_heads, head_v_dim or head_dim
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads ({self.num_v_heads}) must be a multiple of num_heads ({num_heads})")
        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.q_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.k_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.v_proj = linear(hidden_size, values, ("embed", "heads"), split=(self.head_v_dim,), **init)
        self.q_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.k_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.v_conv1d = ShortConv(values, short_conv_kernel_size, rngs=rngs)
        self.a_proj = linear(hidden_size, self.num_v_heads, ("embed", "heads"), **init)
        self.b_proj = linear(hidden_size, self.num_v_heads, ("embed", "heads"), **init)
        self.A_log = nnx.Param(log_uniform(rngs.params(), (self.num_v_heads,), 0.0, 16.0), axes=("heads",))
        self.dt_bias = nnx.Param(inverse_softplus_of_time_step(rngs.params(), (self.num_v_heads,)), axes=("heads",))
        self.g_proj = linear(hidden_size, values, ("embed", "heads"), **init)
        self.o_norm = GatedRMSNorm(self.head_v_dim, activation="silu", eps=rms_norm_eps)
        self.o_proj = linear(values, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: RecurrentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        state, history = (None, None) if cache is None else cache
        (q, k, v), history = self.project(x, history, segment_ids)
        logits = self.a_proj(x), self.b_proj(x)
        gate = self.A_log[...], self.dt_bias[...]
        o, state = ops.gated_delta_rule_from_logits(q, k, v, *logits, *gate, initial_state=state, segment_ids=segment_ids)
        return MixerOutput(self.output(o, x), None if cache is None else RecurrentCache(state, history))

    def project(
        self, x: Float[Array, "B T D"], history: Float[Array, "B W1 P"] | None, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[list[Array], Float[Array, "B W1 P"]]:
        """q, k [B, T, H, K] and v [B, T, HV, V] after convolution and SiLU, and the history for the next call."""
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        qkv, history = convolve(convs, (self.q_proj(x), self.k_proj(x), self.v_proj(x)), history, segment_ids)
        heads = self.num_heads, self.num_heads, self.num_v_heads
        return [y.reshape(*y.shape[:2], n, -1) for y, n in zip(qkv, heads, strict=True)], history

    def output(self, o: Float[Array, "B T HV V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = self.g_proj(x).reshape(o.shape)
        return self.o_proj(self.o_norm(o, gate).reshape(*o.shape[:2], -1))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> RecurrentCache:
        """The empty state (float32) and convolution history (`dtype`); `max_len` does not matter."""
        del max_len
        width = self.q_conv1d.kernel.shape[1]
        channels = 2 * self.num_heads * self.head_dim + self.num_v_heads * self.head_v_dim
        state = jnp.zeros((batch, self.num_v_heads, self.head_dim, self.head_v_dim), jnp.float32)
        return RecurrentCache(state, jnp.zeros((batch, width - 1, channels), dtype))
