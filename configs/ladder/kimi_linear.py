"""Fifth step of the ladder: Kimi Linear, a decay for every key channel, one MLA layer for three of KDA, and experts.

    kda-jax data
    kda-jax train --config configs/ladder/kimi_linear.py

3,620,334 parameters. Expected: 2.16 bits per byte, measured on an H200.
"""

import pathlib
import runpy

from kda_jax.models import KimiLinearConfig, LinearAttentionConfig

base = runpy.run_path(str(pathlib.Path(__file__).with_name("base.py")))
HIDDEN, LAYERS, HEADS, HEAD_DIM = (base[name] for name in ("HIDDEN", "LAYERS", "HEADS", "HEAD_DIM"))

model = KimiLinearConfig(
    vocab_size=256,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    linear_attn_config=LinearAttentionConfig(head_dim=HEAD_DIM, num_heads=HEADS, kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8)),
    num_attention_heads=HEADS,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=16,
    v_head_dim=64,
    intermediate_size=512,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=88,
)
config = base["run"]("kimi_linear", model)
