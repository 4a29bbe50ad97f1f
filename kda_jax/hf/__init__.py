"""Hugging Face checkpoints: `load` reads one, `save` writes one that transformers loads. Neither needs torch."""

from kda_jax.hf.load import Checkpoint, Loaded, inspect, load, load_model
from kda_jax.hf.problems import BadCheckpoint, BadTensor
from kda_jax.hf.release import Released, released
from kda_jax.hf.save import save
