"""Kimi Delta Attention: the delta rule with a decay of its own for every key channel."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import ops
from kda_jax.layers.caches import MixerOutput, RecurrentCache
from kda_jax.layers.initializers import inverse_softplus_of_time_step, linear, log_uniform
from kda_jax.layers.norms import GatedRMSNorm
from kda_jax.layers.short_conv import ShortConv, convolve


class KimiDeltaAttention(nnx.Module):
    """S_t = (I - beta k k^T) Diag(alpha_t) S_{t-1} + beta k v^T (Kimi Linear, arXiv 2510.26692, section 4).

    q, k, v: projection, short convolution, SiLU; q and k then L2-normalised. The decay comes from a low-rank projection,
    log alpha = -exp(A_log) softplus(f + dt_bias), beta = sigmoid. Output: RMS norm per head, times the sigmoid of a gate, projection.
    Kimi K3 (arXiv 2607.24653, section 2.1.1) bounds the decay and gives the output gate full rank.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K of queries and keys, and the rank of the low-rank projections.
        head_v_dim: V of values; head_dim if None.
        short_conv_kernel_size: W.
        lower_bound: None for Kimi Linear's decay; -5 in K3: log alpha = lower_bound sigmoid(exp(A_log) (f + dt_bias)).
        full_rank_gate: one projection `g_proj` (K3) instead of `g_a_proj`, `g_b_proj`.
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
        lower_bound: float | None = None,
        full_rank_gate: bool = False,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        self.lower_bound = lower_bound
        keys, values = num_heads * head_dim, num_heads * self.head_v_dim
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.q_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.k_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.v_proj = linear(hidden_size, values, ("embed", "heads"), split=(self.head_v_dim,), **init)
        self.q_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.k_conv1d = ShortConv(keys, short_conv_kernel_size, rngs=rngs)
        self.v_conv1d = ShortConv(values, short_conv_kernel_size, rngs=rngs)
        self.f_a_proj = linear(hidden_size, head_dim, ("embed", None), **init)
        self.f_b_proj = linear(head_dim, keys, (None, "heads"), **init)
        A_log = log_uniform(rngs.params(), (num_heads,), 1.0, 16.0) if lower_bound is None else jnp.zeros(num_heads)
        self.A_log = nnx.Param(A_log, axes=("heads",))
        self.dt_bias = nnx.Param(inverse_softplus_of_time_step(rngs.params(), (keys,)), axes=("heads",))
        self.b_proj = linear(hidden_size, num_heads, ("embed", "heads"), **init)
        if full_rank_gate:
            self.g_proj = linear(hidden_size, values, ("embed", "heads"), **init)
        else:
            self.g_a_proj = linear(hidden_size, head_dim, ("embed", None), **init)
            self.g_b_proj = linear(head_dim, values, (None, "heads"), **init)
        self.full_rank_gate = full_rank_gate
        self.o_norm = GatedRMSNorm(self.head_v_dim, activation="sigmoid", eps=rms_norm_eps)
        self.o_proj = linear(values, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: RecurrentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        state, history = (None, None) if cache is None else cache
        (q, k, v), history = self.project(x, history, segment_ids)
        o, state = ops.kda_from_logits(
            q,
            k,
            v,
            *self.gate_logits(x),
            self.A_log[...],
            self.dt_bias[...].reshape(self.num_heads, self.head_dim),
            lower_bound=self.lower_bound,
            initial_state=state,
            segment_ids=segment_ids,
        )
        return MixerOutput(self.output(o, x), None if cache is None else RecurrentCache(state, history))

    def project(
        self, x: Float[Array, "B T D"], history: Float[Array, "B W1 P"] | None, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[list[Float[Array, "B T H _"]], Float[Array, "B W1 P"]]:
        """q, k [B, T, H, K] and v [B, T, H, V] after convolution and SiLU, and the history for the next call."""
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        qkv, history = convolve(convs, (self.q_proj(x), self.k_proj(x), self.v_proj(x)), history, segment_ids)
        return [y.reshape(*y.shape[:2], self.num_heads, -1) for y in qkv], history

    def gate_logits(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
        """Logits of the decay and of beta; the op makes gates of them in float32."""
        f = self.f_b_proj(self.f_a_proj(x))
        return f.reshape(*f.shape[:2], self.num_heads, self.head_dim), self.b_proj(x)

    def output(self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj(self.o_norm(o, gate.reshape(o.shape)).reshape(*o.shape[:2], -1))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> RecurrentCache:
        """The empty state (float32) and convolution history (`dtype`); `max_len` does not matter."""
        del max_len
        width = self.q_conv1d.kernel.shape[1]
        channels = self.num_heads * (2 * self.head_dim + self.head_v_dim)
        state = jnp.zeros((batch, self.num_heads, self.head_dim, self.head_v_dim), jnp.float32)
        return RecurrentCache(state, jnp.zeros((batch, width - 1, channels), dtype))
