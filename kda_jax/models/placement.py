"""A model on a mesh: what its parameters' logical names make of `kda_jax.sharding`, for all layers at once."""

from typing import Any

import jax
from flax import nnx

from kda_jax import sharding


def axes(model: nnx.Module) -> dict[str, sharding.Names]:
    """Logical names of every array of a model (or of its shapes), by dotted path; stacked layers have one axis more than names."""
    return {".".join(map(str, path)): variable.get_metadata("axes") for path, variable in nnx.to_flat_state(nnx.state(model))}


def place(module: Any, mesh: jax.sharding.Mesh) -> Any:
    """The module with every array stored on `mesh` as the rules say. For models made on one device; larger ones are made in parts."""
    leaves, tree = jax.tree.flatten(module)
    pairs = zip(leaves, _variables(module), strict=True)
    return tree.unflatten([jax.device_put(x, sharding.parameter_sharding(mesh, v.get_metadata("axes"), x.shape)) for x, v in pairs])


def gathered(module: Any, but: Any = None) -> Any:
    """The module with its parameters as products need them, see `sharding.gather`; the module itself without a mesh.

    Called where a block runs, inside its rematerialisation, so that only one block's parameters are whole at a time (ZeRO stage 3,
    Rajbhandari et al., arXiv 1910.02054).

    Args:
        but: a submodule that is left as it is, because its blocks do it for themselves.
    """
    if sharding.ambient() is None:
        return module
    left = {id(variable) for variable in _variables(but)}
    leaves, tree = jax.tree.flatten(module)
    pairs = zip(leaves, _variables(module), strict=True)
    return tree.unflatten([x if id(v) in left else sharding.gather(x, v.get_metadata("axes")) for x, v in pairs])


def _variables(module: Any) -> list[nnx.Variable]:
    """In the order of the leaves: every variable holds one array."""
    return jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, nnx.Variable))
