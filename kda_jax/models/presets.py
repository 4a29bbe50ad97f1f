"""Named configurations: the released sizes, and small ones for a laptop and for tests."""

from kda_jax.models.config import (
    GPT2Config,
    K3LinearAttentionConfig,
    KimiK3Config,
    KimiLinearConfig,
    LinearAttentionConfig,
    LinearLMConfig,
    Mixer,
)


def gpt2_124m() -> GPT2Config:
    """GPT-2 small as released: 124,439,808 parameters."""
    return GPT2Config()


def gpt2_tiny() -> GPT2Config:
    """GPT-2's shape over bytes, 3.4M parameters: trains on a CPU in minutes."""
    return GPT2Config(vocab_size=256, n_positions=1024, n_embd=256, n_layer=4, n_head=4)


def linear_lm(mixer: Mixer = "gated_deltanet") -> LinearLMConfig:
    """GPT-2 small with a recurrent mixer in place of attention: same width, depth and vocabulary, parameters within 1% of 124M."""
    shapes = {
        "linear_attention": {"num_heads": 12, "head_dim": 64, "intermediate_size": 2048},
        "mamba2": {"num_heads": 1, "head_dim": 128, "num_v_heads": 24, "expand_v": 0.5, "intermediate_size": 1472},
        "deltanet": {"num_heads": 6, "head_dim": 128, "intermediate_size": 2048},
        "gated_deltanet": {"num_heads": 6, "head_dim": 96, "expand_v": 2.0, "intermediate_size": 1536},
        "kda": {"num_heads": 6, "head_dim": 128, "intermediate_size": 1920},
    }
    if mixer not in shapes:
        raise ValueError(f"mixer must be one of {', '.join(shapes)}, got {mixer!r}")
    return LinearLMConfig(mixer=mixer, **shapes[mixer])


def kimi_linear_48b_a3b() -> KimiLinearConfig:
    """Kimi Linear 48B-A3B as released: 49,122,681,728 parameters, 3,484,459,904 active per token."""
    return KimiLinearConfig()


def kimi_linear_tiny() -> KimiLinearConfig:
    """Kimi Linear over bytes: 8 layers 3 KDA : 1 MLA, 8 experts top-2, a few million parameters."""
    return KimiLinearConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=8,
        linear_attn_config=LinearAttentionConfig(head_dim=32, num_heads=4, kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8)),
        num_attention_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=512,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=128,
    )


def tiny_hybrid() -> KimiLinearConfig:
    """The smallest model with every part of Kimi Linear: KDA, KDA, KDA, MLA, width 64, 8 experts top-2. For tests."""
    return KimiLinearConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=4,
        linear_attn_config=LinearAttentionConfig(head_dim=16, num_heads=4, kda_layers=(1, 2, 3), full_attn_layers=(4,)),
        num_attention_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=128,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=32,
    )


def kimi_k3() -> KimiK3Config:
    """Kimi K3's text model as released: 2,779,484,478,208 parameters, 105.4B active per token, 104.2B without the input embedding."""
    return KimiK3Config(linear_attn_config=K3LinearAttentionConfig(A_log_entries=128))


def kimi_k3_tiny() -> KimiK3Config:
    """Kimi K3 over bytes: 10 layers in blocks of 4, the last two MLA, 16 experts top-2 in a latent of 64, a few million parameters."""
    return KimiK3Config(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=10,
        linear_attn_config=K3LinearAttentionConfig(head_dim=32, num_heads=4, kda_layers=(1, 2, 3, 4, 6, 7, 8), full_attn_layers=(5, 9, 10)),
        num_attention_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=512,
        num_experts=16,
        num_experts_per_token=2,
        moe_intermediate_size=96,
        routed_expert_hidden_size=64,
        attn_res_block_size=4,
    )


def tiny_k3() -> KimiK3Config:
    """The smallest model with every part of Kimi K3: 8 layers, the last two MLA, blocks of 3 that end inside the periods. For tests."""
    return KimiK3Config(
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=8,
        linear_attn_config=K3LinearAttentionConfig(
            head_dim=16, num_heads=3, kda_layers=(1, 2, 4, 6), full_attn_layers=(3, 5, 7, 8), A_log_entries=4
        ),
        num_attention_heads=3,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=80,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        attn_res_block_size=3,
    )
