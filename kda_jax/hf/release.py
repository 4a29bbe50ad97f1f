"""What a release of a model consists of, tensor by tensor, without the model: names, shapes and dtypes of its files."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kda_jax import models
from kda_jax.errors import UserError
from kda_jax.hf.family import source
from kda_jax.hf.files import PACKED, SCALE
from kda_jax.hf.forms import Shape
from kda_jax.hf.load import FAMILIES
from kda_jax.hf.mxfp4 import GROUP
from kda_jax.layers.params import FLOAT32, has_name
from kda_jax.models.config import ModelConfig
from kda_jax.train.state import flatten


class Released(NamedTuple):
    """A tensor of a release."""

    name: str
    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parameters(self) -> int:
        """Numbers of the model in it: two in a packed byte, none in a scale."""
        if self.name.endswith(SCALE):
            return 0
        return math.prod(self.shape) * (2 if self.name.endswith(PACKED) else 1)


def released(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Iterator[Released]:
    """Every tensor of the release of `config`: `dtype`, but float32 and MXFP4 where the release has them.

    Args:
        config: of a family that `hf` knows.
        dtype: of most tensors.

    Example:
        >>> from kda_jax import hf, models
        >>> sum(1 for _ in hf.released(models.presets.gpt2_124m()))
        148
    """
    family = next((family for family in FAMILIES.values() if type(config) is family.config_class), None)
    if family is None:
        raise UserError(f"there is no release of a {type(config).__name__}; there are those of {', '.join(FAMILIES)}")
    model = nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    for path, leaf in flatten(nnx.to_pure_dict(nnx.state(model))).items():
        names, tensor = source(family, config, model.stack.layout, path, leaf.shape)
        shape = tensor.form.shape(leaf.shape[names.ndim :])
        kind = np.dtype(np.float32) if tensor.stored == "float32" or has_name(path, FLOAT32) else np.dtype(jnp.dtype(dtype))
        for name in names.flat:
            name = family.root + name
            if tensor.stored == "mxfp4":
                stem = name.removesuffix(".weight")
                yield Released(stem + PACKED, (shape[0], shape[1] // 2), np.dtype(np.uint8))
                yield Released(stem + SCALE, (shape[0], shape[1] // GROUP), np.dtype(np.uint8))
            else:
                yield Released(name, shape, kind)
