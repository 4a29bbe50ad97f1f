"""Beginning a run with the parameters of another: fine-tuning."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from kda_jax.checkpoint import load, read_run_config
from kda_jax.config import ModelConfig
from kda_jax.errors import UserError
from kda_jax.train.state import split


def check_start(path: str | Path, wanted: ModelConfig) -> None:
    """Raise UserError unless the run directory or Hugging Face directory `path` holds a model of the configuration `wanted`."""
    found = _model_config(Path(path))
    if type(found) is not type(wanted):
        raise UserError(f"train.start_from: {path} holds a {found.model_type} model, and model is a {wanted.model_type}")
    names = [f.name for f in dataclasses.fields(wanted) if f.name != "remat" and getattr(found, f.name) != getattr(wanted, f.name)]
    if names:
        differences = [f"model.{name}: {getattr(found, name)!r} there, {getattr(wanted, name)!r} here" for name in names]
        raise UserError(f"train.start_from: {path} holds another model: {'; '.join(differences)}")


def start_weights(path: str | Path, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
    """(parameters, buffers) of the model in `path`, float32 masters, where a run on `mesh` has them."""
    _, params, buffers = split(load(path, mesh=mesh))
    return tuple(jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (params, buffers))


def _model_config(path: Path) -> ModelConfig:
    if any(path.glob("*.safetensors*")):
        from kda_jax import hf

        return hf.inspect(path).config
    if not path.is_dir():
        raise UserError(f"train.start_from: {path} is neither a run directory nor a Hugging Face directory")
    return read_run_config(path).model
