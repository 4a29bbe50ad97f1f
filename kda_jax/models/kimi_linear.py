"""Kimi Linear (arXiv 2510.26692): three KDA layers to one NoPE MLA layer, mixture-of-experts FFNs after a dense first."""

from flax import nnx

from kda_jax.layers import KimiDeltaAttention, MoE, MultiHeadLatentAttention, SwiGLU
from kda_jax.models.block import Block
from kda_jax.models.config import KimiLinearConfig
from kda_jax.models.decoder import Decoder


class KimiLinear(Decoder):
    """Kimi Linear over `models.KimiLinearConfig`. KDA carries order, so the attention layers have no positions."""

    def __init__(self, config: KimiLinearConfig, rngs: nnx.Rngs):
        layers = range(config.num_hidden_layers)
        kinds = [("kda" if config.is_kda(i) else "mla", "moe" if config.is_moe(i) else "dense") for i in layers]
        super().__init__(config, kinds, lambda kind, rngs: _block(config, kind, rngs), rngs)


def _block(config: KimiLinearConfig, kind: tuple[str, str], rngs: nnx.Rngs) -> Block:
    mixer = _kda(config, rngs) if kind[0] == "kda" else _mla(config, rngs)
    ffn = _moe(config, rngs) if kind[1] == "moe" else _dense(config, rngs)
    return Block(mixer, ffn, hidden_size=config.hidden_size, rms_norm_eps=config.rms_norm_eps)


def _kda(config: KimiLinearConfig, rngs: nnx.Rngs) -> KimiDeltaAttention:
    linear = config.linear_attn_config
    return KimiDeltaAttention(
        hidden_size=config.hidden_size,
        num_heads=linear.num_heads,
        head_dim=linear.head_dim,
        short_conv_kernel_size=linear.short_conv_kernel_size,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _mla(config: KimiLinearConfig, rngs: nnx.Rngs) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _dense(config: KimiLinearConfig, rngs: nnx.Rngs) -> SwiGLU:
    return SwiGLU(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )


def _moe(config: KimiLinearConfig, rngs: nnx.Rngs) -> MoE:
    return MoE(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_token,
        num_shared_experts=config.num_shared_experts,
        renormalize=config.moe_renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
        activation=config.moe_router_activation_func,
        num_groups=config.num_expert_group,
        top_groups=config.topk_group,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )
