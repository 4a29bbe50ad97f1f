"""What a training run carries from step to step, as plain nested dicts of arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from kda_jax import models
from kda_jax.config import ModelConfig


class TrainState(NamedTuple):
    """Everything that a step changes. There is no random state besides: initial weights and data order are functions of the seed."""

    params: dict
    """float32 masters."""
    buffers: dict
    """What the model holds besides parameters: the routers' selection biases."""
    opt_state: Any
    step: Int[Array, ""] | jax.ShapeDtypeStruct
    """Steps done, which is also the number of the next batch."""


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """(structure, parameters, buffers) of a model. The arrays are those of `model`: once they are donated, `model` is dead."""
    graphdef, params, buffers = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def merge(graphdef: nnx.GraphDef, params: dict, buffers: dict) -> nnx.Module:
    """The inverse of `split`."""
    return nnx.merge(graphdef, params, buffers)


def structure(config: ModelConfig) -> nnx.GraphDef:
    """The model's structure, without its arrays."""
    return split(nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0))))[0]


def initial_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A fresh state: a function of the model's configuration and the seed. Under `jax.eval_shape` its shapes and dtypes."""
    _, params, buffers = split(models.build(config, nnx.Rngs(seed)))
    return TrainState(params, buffers, optimizer.init(params), jnp.zeros((), jnp.int32))


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path ("layers.periods.0.mixer.A_log"): names for people, and keys that survive any file format.

    Integer keys of layer lists become text on disk in every format; with paths as names there is nothing to get wrong.
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(target: Any, leaves: dict[str, Any]) -> Any:
    """A tree of the structure of `target` with the leaves that `flatten` named."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], target)


def path_name(path: tuple) -> str:
    """A tree path, dotted."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
