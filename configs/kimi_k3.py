"""Kimi K3 (text, 2.8T-A104B) on 2,048 chips of v5p: context 8,192, per-head Muon with QK-clip, cosine as in arXiv 2607.24653, section 2.5.

    kda-jax plan --config configs/kimi_k3.py --topology v5p:8x16x16 --program train
    kda-jax train --config configs/kimi_k3.py --run-dir /mnt/runs/k3 --distributed

It takes 54.3 GiB of each chip's 95; on half of the slice, `--topology v5p:8x8x16 --mesh.fsdp 16 --train.batch-size 512`, 71.8. An owner of
experts keeps room for twice the mean load (choices beyond are dropped and counted); room for all that could come is 16 times that, 15 GB
for each of several buffers.

Peak rate, batch and number of tokens are not published: those here are ours. The text is to be put in `data.source`.
"""

import dataclasses

from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets
from kda_jax.sharding import MeshConfig

config = RunConfig(
    name="kimi_k3",
    model=dataclasses.replace(presets.kimi_k3(), remat="full"),
    data=DataConfig(seq_len=8192),
    optim=OptimConfig(algorithm="muon", newton_schulz_dtype="bfloat16", learning_rate=2e-4, warmup_steps=1000, qk_clip=100.0),
    train=TrainConfig(steps=100_000, batch_size=1024, compute_dtype="bfloat16", expert_capacity=2.0),
    mesh=MeshConfig(fsdp=32, expert=32, context=2),
)
