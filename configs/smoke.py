"""The smallest run with every part of the demo: four layers KDA, KDA, KDA, MLA with experts, twenty steps. For tests and first tries.

    kda-jax data
    kda-jax train --config configs/smoke.py

Expected: a minute of processor time, most of it compilation; 5.1 bits per byte on held-out text.
"""

import dataclasses

from kda_jax.config import CheckpointConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets

config = RunConfig(
    name="smoke",
    model=dataclasses.replace(presets.tiny_hybrid(), vocab_size=256),
    data=DataConfig(source=("data/english",), seq_len=64),
    optim=OptimConfig(learning_rate=3e-3, warmup_steps=4),
    train=TrainConfig(steps=20, batch_size=4, log_every=1),
    eval=EvalConfig(every=10, rows=16, final_rows=32),
    checkpoint=CheckpointConfig(every=5, keep=2),
)
