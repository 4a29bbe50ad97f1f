"""GPT-2's softmax attention, with the KV cache that every later layer replaces."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers.caches import AttentionCache, MixerOutput, place, write
from kda_jax.layers.initializers import linear
from kda_jax.ops.attention import attention


class GPT2Attention(nnx.Module):
    """o_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j per head, projections with biases (Radford et al. 2019; arXiv 1706.03762).

    Args:
        hidden_size: D, a multiple of num_heads.
        num_heads: H; heads are D / H wide, scores are scaled by the root of that.
        initializer_range: standard deviation of c_attn.
        residual_initializer_range: that of c_proj, 0.02 / sqrt(2 layers) in GPT-2; initializer_range if None.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        initializer_range: float = 0.02,
        residual_initializer_range: float | None = None,
        rngs: nnx.Rngs,
    ):
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size ({hidden_size}) must be a multiple of num_heads ({num_heads})")
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        std = initializer_range if residual_initializer_range is None else residual_initializer_range
        heads = {"axes": ("embed", "heads"), "split": (self.head_dim,)}
        self.c_attn = linear(hidden_size, 3 * hidden_size, **heads, use_bias=True, initializer_range=initializer_range, rngs=rngs)
        self.c_proj = linear(hidden_size, hidden_size, ("heads", "embed"), use_bias=True, initializer_range=std, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: AttentionCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        q, k, v = self.project(x)
        if cache is None:
            return MixerOutput(self.output(attention(q, k, v, segment_ids=segment_ids)), None)
        at = place(cache, x.shape[1], segment_ids)
        cache = AttentionCache(write(cache.k, k, at.slot), write(cache.v, v, at.slot), at.new_length, at.new_start)
        o = attention(q, cache.k, cache.v, q_index=at.q_index, start=at.start)
        return MixerOutput(self.output(o), cache)

    def project(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T H K"]]:
        qkv = jnp.split(self.c_attn(x), 3, axis=-1)
        return [y.reshape(*y.shape[:2], self.num_heads, self.head_dim) for y in qkv]

    def output(self, o: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        return self.c_proj(o.reshape(*o.shape[:2], -1))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> AttentionCache:
        """Room for `max_len` tokens per row: 2 D numbers per token."""
        k, v = (jnp.zeros((batch, max_len, self.num_heads, self.head_dim), dtype) for _ in range(2))
        length, start = (jnp.zeros(batch, jnp.int32) for _ in range(2))
        return AttentionCache(k, v, length, start)
