"""What the five runs of the ladder share: text, tokens, schedule, width and depth. Each file beside it adds a model of 3.6M parameters."""

from kda_jax.config import CheckpointConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig

HIDDEN, LAYERS, HEADS, HEAD_DIM = 192, 8, 3, 64


def run(name, model):
    """The run `name`: bytes of the demo's text, 1000 steps of 8 rows of 256."""
    return RunConfig(
        name=f"ladder-{name}",
        model=model,
        data=DataConfig(source=("data/english",), seq_len=256),
        optim=OptimConfig(learning_rate=4e-3, warmup_steps=50, final_fraction=0.05),
        train=TrainConfig(steps=1000, batch_size=8, log_every=20),
        eval=EvalConfig(every=250, rows=128, final_rows=1024),
        checkpoint=CheckpointConfig(every=250, keep=2),
    )


config = None  # not a run by itself
