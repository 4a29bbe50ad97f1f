"""Multi-head latent attention: keys and values are linear functions of one small latent per token, which is all the cache holds."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers.caches import LatentCache, MixerOutput, place, write
from kda_jax.layers.initializers import linear
from kda_jax.layers.norms import RMSNorm
from kda_jax.ops.attention import AttentionOutput, attention_with_max_logit
from kda_jax.ops.mla import mla
from kda_jax.sharding import constrain


class MultiHeadLatentAttention(nnx.Module):
    """MLA without positions (DeepSeek-V2, arXiv 2405.04434, section 2.1; NoPE in Kimi Linear, arXiv 2510.26692, section 4).

    Queries have N + P dims per head. The latent c (R dims, RMS-normed) gives each head N dims of key and V of value; P more key dims
    k_r come straight from the input and are shared by all heads. Nothing is rotated. Scores are scaled by (N + P)**-0.5 whatever
    the rank. Kimi K3 (arXiv 2607.24653, eq. 7) makes the queries low-rank too and gates the output.

    There are two ways to the same numbers. `expanded` makes keys and values for every head: N + P + V products per score. `absorbed`
    lets every head attend to the latents (`ops.mla`): it reads only R + P numbers per token of a cache, at 2 (R + P) products per
    score, 3.6 times as many in the released models. So whole sequences and the first piece of a prompt are expanded, and what
    continues a cache is absorbed.

    Args:
        hidden_size: D.
        num_heads: H.
        kv_lora_rank: R.
        qk_nope_head_dim: N.
        qk_rope_head_dim: P, not rotated despite its name in the released configs.
        v_head_dim: V.
        q_lora_rank: rank of the queries (K3), or None for one full projection.
        output_gate: multiply by sigmoid(g_proj x) before the output projection (K3).
        latent_norm_eps: of the norms of the latents; the released code has 1e-6 here and 1e-5 in all other norms.
        initializer_range: standard deviation of the projections.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        output_gate: bool = False,
        latent_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        query_dim, values = qk_nope_head_dim + qk_rope_head_dim, num_heads * v_head_dim
        queries = {"out_features": num_heads * query_dim, "split": (query_dim,)}
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.low_rank_queries, self.output_gate = q_lora_rank is not None, output_gate
        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, axes=("embed", "heads"), **queries, **init)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank, ("embed", "latent"), **init)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=latent_norm_eps, axis="latent")
            self.q_b_proj = linear(q_lora_rank, axes=("latent", "heads"), **queries, **init)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim, ("embed", "latent"), **init)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=latent_norm_eps, axis="latent")
        split = qk_nope_head_dim, v_head_dim  # of each head: W_UK and W_UV
        self.kv_b_proj = linear(kv_lora_rank, num_heads * sum(split), ("latent", "heads"), split=split, **init)
        if output_gate:
            self.g_proj = linear(hidden_size, values, ("embed", "heads"), **init)
        self.o_proj = linear(values, hidden_size, ("heads", "embed"), **init)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: LatentCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> MixerOutput:
        q, latent = self.queries(x), self.latent(x)
        if cache is None:
            o, max_logit = self.expanded(q, latent, segment_ids)
            return MixerOutput(self.output(o, x), None, jnp.max(max_logit, axis=(0, 1)))
        at = place(cache, x.shape[1], segment_ids)
        new_cache = LatentCache(write(cache.latent, latent, at.slot), at.new_length, at.new_start)

        def continued():
            return self.absorbed(q, new_cache.latent, at.q_index, at.start)

        if x.shape[1] == 1:
            o = continued()
        else:
            o = jax.lax.cond(jnp.all(cache.length == 0), lambda: self.expanded(q, latent, segment_ids).o, continued)
        return MixerOutput(self.output(o, x), new_cache)

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H QK"]:
        """[nope | rope] per head."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_queries else self.q_proj(x)
        return q.reshape(*q.shape[:2], self.num_heads, -1)

    def latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T RP"]:
        """What the cache holds: [c after its norm | k_r]."""
        c, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_layernorm(c), k_rope], axis=-1)

    def expanded(
        self, q: Float[Array, "B T H QK"], latent: Float[Array, "B T RP"], segment_ids: Int[Array, "B T"] | None
    ) -> AttentionOutput:
        """Attention over keys and values of every head: for whole sequences. Where time is split, devices exchange latents, not keys."""
        c, k_rope = jnp.split(constrain(latent, "batch", "keys", None), [self.kv_lora_rank], axis=-1)
        kv = self.kv_b_proj(c).reshape(*c.shape[:2], self.num_heads, -1)
        k, v = jnp.split(kv, [self.qk_nope_head_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], self.qk_rope_head_dim))
        return attention_with_max_logit(q, jnp.concatenate([k, k_rope], axis=-1), v, scale=self.scale, segment_ids=segment_ids)

    def absorbed(
        self,
        q: Float[Array, "B T H QK"],
        latent: Float[Array, "B S RP"],
        q_index: Int[Array, "B T"],
        start: Int[Array, "B T"],
    ) -> Float[Array, "B T H V"]:
        """The same against the latents of a cache: W_UK moves to the queries, W_UV behind the sum."""
        w_kv = self.kv_b_proj.kernel[...].reshape(self.kv_lora_rank, self.num_heads, -1)
        w_uk, w_uv = jnp.split(w_kv, [self.qk_nope_head_dim], axis=-1)
        q_nope, q_rope = jnp.split(q, [self.qk_nope_head_dim], axis=-1)
        q_latent = jnp.einsum("bthn,rhn->bthr", q_nope, w_uk)
        o = mla(q_latent, q_rope, latent, scale=self.scale, q_index=q_index, start=start)
        return jnp.einsum("bthr,rhv->bthv", o, w_uv)

    def output(self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = o.reshape(*o.shape[:2], -1)
        if self.output_gate:
            y = y * jax.nn.sigmoid(self.g_proj(x))
        return self.o_proj(y)

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> LatentCache:
        """Room for `max_len` tokens per row: R + P numbers per token."""
        latent = jnp.zeros((batch, max_len, self.kv_lora_rank + self.qk_rope_head_dim), dtype)
        length, start = (jnp.zeros(batch, jnp.int32) for _ in range(2))
        return LatentCache(latent, length, start)
