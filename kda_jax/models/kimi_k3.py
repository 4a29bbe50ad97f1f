"""Kimi K3 (arXiv 2607.24653), text: bounded KDA and gated MLA along the sequence, Attention Residuals along depth, LatentMoE in width."""

import functools

from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers import AttentionResidual, DepthStream, KimiDeltaAttention, LatentMoE, MultiHeadLatentAttention, RMSNorm, SiTU
from kda_jax.models.config import KimiK3Config
from kda_jax.models.decoder import Decoder
from kda_jax.models.depth_stack import DepthStack
from kda_jax.models.stack import BlockOutput
from kda_jax.ops.activations import Situ
from kda_jax.ops.segments import segments


class K3Block(nnx.Module):
    """Mix the sources, attend, mix again, feed forward: there is no residual stream besides the sources. Names as in the release.

    h = mix(stream), then the stream may open a block (it banks what came *in*), then stream + Attn(norm(h)); the same with the FFN.
    """

    def __init__(self, config: KimiK3Config, kind: tuple[str, str], rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.block_sublayers = config.block_sublayers
        self.self_attention_res = AttentionResidual(D, eps=eps)
        self.input_layernorm = RMSNorm(D, eps=eps, axis="embed")
        self.self_attn = _kda(config, rngs) if kind[0] == "kda" else _mla(config, rngs)
        self.mlp_res = AttentionResidual(D, eps=eps)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, axis="embed")
        if kind[1] == "moe":
            self.block_sparse_moe = _moe(config, rngs)
        else:
            self.mlp = _dense(config, rngs)

    @property
    def mixer(self) -> nnx.Module:
        return self.self_attn

    def __call__(self, stream: DepthStream, *, cache=None, segment_ids: Int[Array, "B T"] | None = None) -> BlockOutput:
        h = self.self_attention_res(stream)
        mixed = self.self_attn(self.input_layernorm(h), cache=cache, segment_ids=segment_ids)
        stream = stream.enter(self.block_sublayers).add(mixed.y)
        h = self.post_attention_layernorm(self.mlp_res(stream))
        if self.block_sublayers % 2:  # in blocks of whole layers the second sublayer opens none
            stream = stream.enter(self.block_sublayers)
        if hasattr(self, "mlp"):
            return BlockOutput(stream.add(self.mlp(h)), mixed.cache, None, mixed.max_logits)
        routed = self.block_sparse_moe(h, valid=None if segment_ids is None else segments(segment_ids).valid)
        return BlockOutput(stream.add(routed.y), mixed.cache, routed.counts, mixed.max_logits, routed.histogram, routed.dropped)

    def init_cache(self, batch: int, max_len: int, dtype):
        return self.self_attn.init_cache(batch, max_len, dtype)


class KimiK3(Decoder):
    """Kimi K3's text model over `models.KimiK3Config`.

    Numerics of a 16-bit run, in the order of the released code: a mix of sources is float32 and rounded before the norm; a norm is float32,
    rounded, then times its weight; every projection rounds its result (f_a's between its two products); convolution and SiLU are float32,
    rounded; gate, beta and state float32; the recurrence's output rounded before the gated norm, which is float32 and rounded once; router
    float32; w1, w3 rounded, SiTU float32, rounded; w2 rounded, times float32 weights, summed, rounded before the latent norm; prefix sums
    are kept in the stream's dtype.
    """

    def __init__(self, config: KimiK3Config, rngs: nnx.Rngs):
        layers = range(config.num_hidden_layers)
        kinds = [("kda" if config.is_kda(i) else "mla", "moe" if config.is_moe(i) else "dense") for i in layers]
        stack = functools.partial(DepthStack, block_sublayers=config.block_sublayers)
        super().__init__(config, kinds, lambda kind, rngs: K3Block(config, kind, rngs), rngs, stack=stack)
        self.output_attn_res = AttentionResidual(config.hidden_size, eps=config.rms_norm_eps)

    def head(self, x: DepthStream) -> Float[Array, "B T Z"]:
        return super().head(self.output_attn_res(x))


def _situ(config: KimiK3Config) -> Situ:
    return Situ(config.activation_situ_beta, config.activation_situ_linear_beta)


def _kda(config: KimiK3Config, rngs: nnx.Rngs) -> KimiDeltaAttention:
    linear = config.linear_attn_config
    return KimiDeltaAttention(
        hidden_size=config.hidden_size,
        num_heads=linear.num_heads,
        head_dim=linear.head_dim,
        short_conv_kernel_size=linear.short_conv_kernel_size,
        lower_bound=linear.gate_lower_bound,
        full_rank_gate=True,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _mla(config: KimiK3Config, rngs: nnx.Rngs) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        output_gate=True,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _dense(config: KimiK3Config, rngs: nnx.Rngs) -> SiTU:
    return SiTU(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        activation=_situ(config),
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _moe(config: KimiK3Config, rngs: nnx.Rngs) -> LatentMoE:
    return LatentMoE(
        hidden_size=config.hidden_size,
        latent_size=config.routed_expert_hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_token,
        num_shared_experts=config.num_shared_experts,
        activation=_situ(config),
        renormalize=config.moe_renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )
