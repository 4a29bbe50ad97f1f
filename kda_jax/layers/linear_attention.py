"""Linear attention: softmax replaced by a feature map, so that the past is a sum of fixed size."""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import ops
from kda_jax.layers.caches import MixerOutput, RecurrentCache
from kda_jax.layers.initializers import linear
from kda_jax.layers.norms import RMSNorm


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + 1 for x >= 0, exp(x) below: positive features (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 7).

    Written without elu(x) + 1, which cancels to 0 in 16 bits from about x = -6 on. The gradient at 0 is 1.
    """
    return jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


class LinearAttention(nnx.Module):
    """S_t = S_{t-1} + phi(k_t) v_t^T, with phi = elu + 1 (Katharopoulos et al. 2020, arXiv 2006.16236).

    The two variants are different models, not two ways to compute one:

    * "original": o_t = S_t^T phi(q_t) / (phi(q_t) . z_t) with z_t = sum phi(k), eqs. 16-20. No scale, no output norm.
    * "modern": o_t = RMSNorm(K^-1/2 S_t^T phi(q_t)), per head. The norm takes the place of the ratio, which can divide by almost 0
      (Qin et al. 2022, arXiv 2210.10340; RetNet, arXiv 2307.08621).

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K of queries and keys.
        head_v_dim: V of values; head_dim if None.
        variant: "modern" or "original".
        rms_norm_eps: of the output norm of "modern".
        initializer_range: standard deviation of the projections.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        head_v_dim: int | None = None,
        variant: Literal["modern", "original"] = "modern",
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        if variant not in ("modern", "original"):
            raise ValueError(f"variant is {variant!r}; expected 'modern' or 'original'")
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        self.variant = variant
        keys, values = num_heads * head_dim, num_heads * self.head_v_dim
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.q_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.k_proj = linear(hidden_size, keys, ("embed", "heads"), split=(head_dim,), **init)
        self.v_proj = linear(hidden_size, values, ("embed", "heads"), split=(self.head_v_dim,), **init)
        self.o_norm = RMSNorm(self.head_v_dim, eps=rms_norm_eps) if variant == "modern" else None
        self.o_proj = linear(values, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: RecurrentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        q, k, v = self.project(x)
        o, state = ops.linear_attention(
            elu_plus_one(q),
            elu_plus_one(k),
            v,
            normalize=self.variant == "original",
            initial_state=None if cache is None else cache.state,
            segment_ids=segment_ids,
        )
        return MixerOutput(self.output(o), None if cache is None else RecurrentCache(state, None))

    def project(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T H _"]]:
        return [y.reshape(*y.shape[:2], self.num_heads, -1) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))]

    def output(self, o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        if self.o_norm is not None:
            o = self.o_norm(o)
        return self.o_proj(o.reshape(*o.shape[:2], -1))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> RecurrentCache:
        """The empty state; "original" carries z as one more column. Neither argument but `batch` matters to its size."""
        del max_len, dtype
        columns = self.head_v_dim + (self.variant == "original")
        return RecurrentCache(jnp.zeros((batch, self.num_heads, self.head_dim, columns), jnp.float32), None)
