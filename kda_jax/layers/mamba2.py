"""Mamba-2: state-space duality, a linear attention whose write and decay share one input-dependent time step."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import ops
from kda_jax.layers.caches import MixerOutput, RecurrentCache
from kda_jax.layers.initializers import inverse_softplus_of_time_step, linear, log_uniform
from kda_jax.layers.norms import RMSNorm
from kda_jax.layers.short_conv import ShortConv
from kda_jax.ops.norms import rms_norm


class Mamba2(nnx.Module):
    """h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t x_t^T, y_t = C_t^T h_t + D x_t (Dao & Gu 2024, arXiv 2405.21060, eq. 4 and section 7).

    In the words of the other layers: q = C, k = B, v = Delta x, log decay = Delta A, no scale, no L2 norm; the state of head h is
    [state_size, head_dim]. A = -exp(A_log) and Delta = softplus(dt + dt_bias) are scalars per head. x, B and C go through one short
    convolution with bias. The output gate acts *before* the norm, unlike Gated DeltaNet's and KDA's: RMSNorm(y * silu(z)), over the
    whole width.

    Args:
        hidden_size: D.
        num_heads: HV, heads of x.
        head_dim: P, width of a head of x.
        state_size: N, width of B and C.
        num_groups: G, heads of B and C; each serves HV / G heads of x.
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
        state_size: int,
        num_groups: int = 1,
        short_conv_kernel_size: int = 4,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        if num_heads % num_groups:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_groups ({num_groups})")
        self.num_heads, self.head_dim, self.state_size, self.num_groups = num_heads, head_dim, state_size, num_groups
        inner, shared = num_heads * head_dim, num_groups * state_size
        init = {"initializer_range": initializer_range, "rngs": rngs}
        split = inner, inner, shared, shared, num_heads  # z, x, B, C, dt
        self.in_proj = linear(hidden_size, sum(split), ("embed", "heads"), split=split, **init)
        self.conv1d = ShortConv(inner + 2 * shared, short_conv_kernel_size, use_bias=True, rngs=rngs)
        self.A_log = nnx.Param(log_uniform(rngs.params(), (num_heads,), 1.0, 16.0), axes=("heads",))
        self.dt_bias = nnx.Param(inverse_softplus_of_time_step(rngs.params(), (num_heads,)), axes=("heads",))
        self.D = nnx.Param(jnp.ones(num_heads), axes=("heads",))
        self.norm = RMSNorm(inner, eps=rms_norm_eps, axis="heads")
        self.out_proj = linear(inner, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: RecurrentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        state, history = (None, None) if cache is None else cache
        z, xBC, dt = self.project(x)
        xBC, history = self.conv1d(xBC, history, segment_ids)
        x, k, q = self.split_heads(xBC)
        delta, g = self.gates(dt)
        v = (delta[..., None] * x).astype(x.dtype)
        o, state = ops.gated_linear_attention(q, k, v, g, scale=1.0, initial_state=state, segment_ids=segment_ids)
        return MixerOutput(self.output(o, x, z), None if cache is None else RecurrentCache(state, history))

    def project(self, x: Float[Array, "B T D"]) -> list[Array]:
        """z [B, T, HV P], x‖B‖C [B, T, HV P + 2 G N], dt [B, T, HV]."""
        inner, channels = self.num_heads * self.head_dim, self.conv1d.channels
        return jnp.split(self.in_proj(x), [inner, inner + channels], axis=-1)

    def split_heads(self, xBC: Float[Array, "B T P"]) -> tuple[Array, Array, Array]:
        """x [B, T, HV, P], B and C [B, T, G, N]."""
        inner, shared = self.num_heads * self.head_dim, self.num_groups * self.state_size
        x, k, q = jnp.split(xBC, [inner, inner + shared], axis=-1)
        heads = self.num_heads, self.num_groups, self.num_groups
        return tuple(y.reshape(*y.shape[:2], n, -1) for y, n in zip((x, k, q), heads, strict=True))

    def gates(self, dt: Float[Array, "B T HV"]) -> tuple[Float[Array, "B T HV"], Float[Array, "B T HV"]]:
        """Time step Delta and log decay Delta A, float32."""
        wide = jnp.promote_types(dt.dtype, jnp.float32)
        delta = jax.nn.softplus(dt.astype(wide) + self.dt_bias[...].astype(wide))
        return delta, -jnp.exp(self.A_log[...].astype(wide)) * delta

    def output(self, o: Float[Array, "B T HV P"], x: Float[Array, "B T HV P"], z: Float[Array, "B T I"]) -> Float[Array, "B T D"]:
        wide = jnp.promote_types(o.dtype, jnp.float32)
        y = o.astype(wide) + self.D[...].astype(wide)[:, None] * x.astype(wide)
        y = y.reshape(z.shape) * jax.nn.silu(z.astype(wide))
        return self.out_proj(rms_norm(y, self.norm.scale[...], self.norm.eps).astype(o.dtype))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> RecurrentCache:
        """The empty state (float32) and convolution history (`dtype`); `max_len` does not matter."""
        del max_len
        channels, width = self.conv1d.kernel.shape
        state = jnp.zeros((batch, self.num_heads, self.state_size, self.head_dim), jnp.float32)
        return RecurrentCache(state, jnp.zeros((batch, width - 1, channels), dtype))
