"""What a training run carries from step to step, as plain nested dicts of arrays."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, Shaped

from kda_jax import models, sharding
from kda_jax.config import ModelConfig
from kda_jax.models.placement import axes


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


def shapes(config: ModelConfig) -> nnx.Module:
    """The model with shapes and dtypes in the place of its arrays."""
    return nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))


def structure(config: ModelConfig) -> nnx.GraphDef:
    """The model's structure, without its arrays."""
    return split(shapes(config))[0]


def splits(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Widths of the matrices side by side in a kernel (heads) of a model, by its dotted name; see `layers.initializers.linear`."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable))
    found = {path_name(path): variable.get_metadata().get("split") for path, variable in leaves}
    return {name: widths for name, widths in found.items() if widths}


def initial_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A fresh state: a function of the model's configuration and the seed. Under `jax.eval_shape` its shapes and dtypes."""
    _, params, buffers = split(models.build(config, nnx.Rngs(seed)))
    return TrainState(params, buffers, optimizer.init(params), jnp.zeros((), jnp.int32))


def state_shardings(model: nnx.Module, abstract: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where every array of a state, or of a part of one, is stored on `mesh`; moments like their parameters.

    A moment is an array of a parameter's shape whose path ends in that parameter's path, whichever optimizer holds it.

    Args:
        model: or its shapes, for the logical names of its arrays.
        abstract: the state, or its shapes and dtypes.
    """
    names, shapes = axes(model), {path: leaf.shape for tree in split(model)[1:] for path, leaf in flatten(tree).items()}

    def one(path: tuple, leaf: Any) -> jax.sharding.NamedSharding:
        parts = path_name(path).split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        owner = next((end for end in ends if end in shapes), None)
        if owner is None or shapes[owner] != leaf.shape:
            return sharding.replicated(mesh)
        return sharding.parameter_sharding(mesh, names[owner], leaf.shape)

    return jax.tree_util.tree_map_with_path(one, abstract)


def left_whole(model: nnx.Module, mesh: jax.sharding.Mesh) -> list[str]:
    """A sentence for every parameter axis that the mesh would split if it divided it (`sharding.parameter_report`)."""
    names, arrays = axes(model), (flatten(tree) for tree in split(model)[1:])
    return sharding.parameter_report(mesh, {path: (names[path], leaf.shape) for tree in arrays for path, leaf in tree.items()})


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes that also say where the arrays are to be."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path ("layers.periods.0.mixer.A_log"): names for people, and keys that survive any file format.

    Integer keys of layer lists become text on disk in every format; with paths as names there is nothing to get wrong.
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(target: Any, leaves: dict[str, Any]) -> Any:
    """A tree of the structure of `target` with the leaves that `flatten` named."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], target)


def by_layer(leaves: Mapping[str, Array], rows: Shaped[Array, "layers *n"]) -> dict[str, Array]:
    """A statistic of layers, one row each in their order, by the names of the leaves that the layers have.

    Args:
        leaves: one of each such layer, or of each stack of layers in the scanned periods, in the order of the tree.
        rows: the statistic.

    Returns:
        [*n] for a leaf of one layer, [repeats, *n] for a stacked one.
    """
    part = lambda name: [n for n in leaves if f".{name}." in n]
    first, stacked, last = part("prologue"), part("periods"), part("epilogue")
    repeats = leaves[stacked[0]].shape[0] if stacked else 0
    middle = len(first) + repeats * len(stacked)
    found = {name: rows[i] for i, name in enumerate(first)}
    found |= {name: rows[len(first) + i : middle : len(stacked)] for i, name in enumerate(stacked)}
    return found | {name: rows[middle + i] for i, name in enumerate(last)}


def path_name(path: tuple) -> str:
    """A tree path, dotted."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
