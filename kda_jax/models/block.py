"""The pre-norm block of every model but GPT-2."""

from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers import MoE, RMSNorm, SwiGLU
from kda_jax.models.stack import BlockOutput
from kda_jax.ops.segments import segments


class Block(nnx.Module):
    """h = x + Mix(norm(x)); h + FFN(norm(h)). Names are those of the released checkpoints."""

    def __init__(self, mixer: nnx.Module, ffn: SwiGLU | MoE, *, hidden_size: int, rms_norm_eps: float):
        self.input_layernorm = RMSNorm(hidden_size, eps=rms_norm_eps, axis="embed")
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=rms_norm_eps, axis="embed")
        if isinstance(ffn, MoE):
            self.block_sparse_moe = ffn
        else:
            self.mlp = ffn

    @property
    def mixer(self) -> nnx.Module:
        return self.self_attn

    def __call__(self, x: Float[Array, "B T D"], *, cache=None, segment_ids: Int[Array, "B T"] | None = None) -> BlockOutput:
        mixed = self.self_attn(self.input_layernorm(x), cache=cache, segment_ids=segment_ids)
        x = x + mixed.y
        h = self.post_attention_layernorm(x)
        if hasattr(self, "mlp"):
            return BlockOutput(x + self.mlp(h), mixed.cache, None, mixed.max_logits)
        routed = self.block_sparse_moe(h, valid=None if segment_ids is None else segments(segment_ids).valid)
        return BlockOutput(x + routed.y, mixed.cache, routed.counts, mixed.max_logits, routed.histogram, routed.dropped)

    def init_cache(self, batch: int, max_len: int, dtype):
        return self.self_attn.init_cache(batch, max_len, dtype)
