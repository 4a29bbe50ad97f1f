"""Kimi Linear 48B-A3B on a pod: context 8,192, MuonClip and WSD as in arXiv 2510.26692, section 5.4.

    kda-jax plan --config configs/kimi_linear_48b.py --topology v5p:4x4x4
    kda-jax train --config configs/kimi_linear_48b.py --run-dir /mnt/runs/48b --distributed

The mesh is that of 64 chips of v5p; another slice needs another one (`--mesh.fsdp 32 --mesh.expert 8` for v6e:16x16), and the plan says
whether it fits. The README has the figures. The text is to be put in `data.source`.
"""

import dataclasses

from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets
from kda_jax.sharding import MeshConfig

config = RunConfig(
    name="kimi_linear_48b",
    model=dataclasses.replace(presets.kimi_linear_48b_a3b(), remat="full"),
    data=DataConfig(seq_len=8192),
    optim=OptimConfig(
        algorithm="muon", newton_schulz_dtype="bfloat16", learning_rate=1.1e-3, schedule="wsd", warmup_steps=2000, qk_clip=100.0
    ),
    train=TrainConfig(steps=100_000, batch_size=64, compute_dtype="bfloat16"),
    mesh=MeshConfig(fsdp=16, expert=4),
)
