"""Runs small enough for tests: text made on the spot, models that compile in seconds."""

import dataclasses
import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.config import CheckpointConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets
from kda_jax.models.config import GPT2Config, LinearAttentionConfig
from kda_jax.train.data import Batch
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.state import TrainState, initial_state, structure
from kda_jax.train.step import make_train_step

GPT2 = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
HYBRID = dataclasses.replace(
    presets.tiny_hybrid(),
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=2,
    linear_attn_config=LinearAttentionConfig(head_dim=16, num_heads=2, kda_layers=(1,), full_attn_layers=(2,)),
    first_k_dense_replace=0,
    num_experts=4,
)
"""One KDA and one MLA layer, both with experts."""


def write_text(directory: Path, documents: int = 6, sentences: int = 60) -> Path:
    """A directory of small documents with something to learn in them."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    nouns, verbs = ["the river", "a stone", "our house", "the king", "her song"], ["holds", "breaks", "carries", "finds"]
    for i in range(documents):
        lines = [f"{chance.choice(nouns)} {chance.choice(verbs)} {chance.choice(nouns)}." for _ in range(sentences)]
        (directory / f"{i}.txt").write_text("\n".join(lines))
    return directory


def run_config(text: Path, model=GPT2, **train) -> RunConfig:
    return RunConfig(
        "tiny",
        model,
        data=DataConfig(source=(str(text),), seq_len=32, validation_fraction=0.2),
        optim=OptimConfig(warmup_steps=2, learning_rate=1e-2),
        train=TrainConfig(**{"steps": 12, "batch_size": 4, "log_every": 1, **train}),
        eval=EvalConfig(every=6, rows=8, final_rows=16),
        checkpoint=CheckpointConfig(every=4, keep=2),
    )


def make_step(config: RunConfig, *, abstract: bool = False):
    """(a fresh state, or its shapes and dtypes, and the jitted step); equal configurations share what is compiled."""
    fresh, step = _functions(config)
    return jax.eval_shape(fresh) if abstract else fresh(), step


@functools.lru_cache
def _functions(config: RunConfig):
    optimizer = make_optimizer(config.optim, config.model)
    fresh = jax.jit(lambda: initial_state(config.model, optimizer, config.train.seed))
    return fresh, make_train_step(structure(config.model), optimizer, make_schedule(config.optim, config.train.steps), config)


def random_batch(rows: int, seq_len: int = 32, seed: int = 0, lengths: list[int] | None = None) -> Batch:
    """Rows of random bytes; `lengths` cuts them short with padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 255, (rows, seq_len + 1)).astype(np.int32)
    segment_ids = np.ones_like(tokens)
    for row, length in enumerate(lengths or []):
        segment_ids[row, length:] = -1
    return Batch(tokens, segment_ids)


def copy(state: TrainState) -> TrainState:
    """A state whose buffers a donating step cannot take."""
    return jax.tree.map(jnp.copy, state)


def relative_error(found, wanted) -> float:
    """RMS of the difference over RMS of `wanted`, over all leaves together."""
    difference = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    return (difference / sum(float(jnp.sum(b**2)) for b in jax.tree.leaves(wanted))) ** 0.5
