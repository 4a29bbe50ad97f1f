"""One KDA and one MLA layer with experts, wide enough to keep a GPU busy: to compare meshes of the devices of one host.

    kda-jax bench --meshes fsdp=2 expert=2 context=2 --config configs/two_gpus.py

175,900,880 parameters, 16 rows of 2,048 random tokens. About six minutes on two H200s, nearly all of it compiling (XLA_FLAGS=
--xla_gpu_autotune_level=0). Expected there: 49,500 tokens/s on one, 101,200, 64,700 and 73,000 on the meshes.
"""

import dataclasses

from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets
from kda_jax.models.config import LinearAttentionConfig

config = RunConfig(
    name="two_gpus",
    model=dataclasses.replace(
        presets.kimi_linear_tiny(),
        vocab_size=32_768,
        hidden_size=1024,
        num_hidden_layers=2,
        first_k_dense_replace=0,
        linear_attn_config=LinearAttentionConfig(head_dim=64, num_heads=16, kda_layers=(1,), full_attn_layers=(2,)),
        intermediate_size=2816,
        num_experts=32,
        moe_intermediate_size=512,
        remat="full",
    ),
    data=DataConfig(seq_len=2048),
    optim=OptimConfig(learning_rate=1e-3, warmup_steps=10),
    train=TrainConfig(steps=100, batch_size=16, compute_dtype="bfloat16"),
)
