"""Writing a checkpoint that transformers loads."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kda_jax.errors import UserError
from kda_jax.hf.family import Family, source
from kda_jax.hf.files import Pending, by_number, write
from kda_jax.hf.load import FAMILIES
from kda_jax.layers.params import cast
from kda_jax.train.state import flatten


def save(model: nnx.Module, directory: str | Path, *, dtype: Any = None, max_file_bytes: int = 5 * 10**9) -> None:
    """Write `model` as config.json and safetensors files, under the names and in the layouts of the release.

    `load` of what was written gives the same arrays to the bit. The directory appears when it is complete, or not at all.

    Args:
        model: a GPT-2 or a Kimi Linear.
        directory: made; if it is there, it must be empty.
        dtype: to convert to, except what `layers.params.FLOAT32` names; None keeps the model's.
        max_file_bytes: size of one file, and of what is in host memory at a time. A tensor is never divided.

    Raises:
        UserError: transformers has no such model, or the directory is not empty.
    """
    directory = Path(directory)
    family = next((family for family in FAMILIES.values() if type(model.config) is family.config_class), None)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"a {type(model).__name__} has no form that transformers loads; export knows {known}")
    config = family.write_config(model.config)
    refuse_occupied(directory)
    params = nnx.to_pure_dict(nnx.state(model))
    params = params if dtype is None else cast(params, jnp.dtype(dtype))
    arrays = flatten(params)
    config |= {"dtype": jnp.dtype(arrays[family.embedding].dtype).name}
    with Partial(directory) as partial:
        write(partial, sorted(_pending(family, model.stack.layout, arrays), key=lambda tensor: by_number(tensor.name)), max_file_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def refuse_occupied(directory: Path) -> None:
    """Raise UserError unless `directory` is free to be made."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty; choose another directory")


class Partial:
    """A directory beside `directory` that takes its place when the block ends well, and is removed when it does not."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._partial = directory.absolute().with_name(f".{directory.absolute().name}.{os.getpid()}")

    def __enter__(self) -> Path:
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self._partial.replace(self._directory)
        else:
            shutil.rmtree(self._partial, ignore_errors=True)


def _pending(family: Family, layout: Any, arrays: dict[str, Array]) -> Iterator[Pending]:
    for path, array in arrays.items():
        names, form = source(family, layout, path, array.shape)
        shape = form.shape(array.shape[names.ndim :])
        for index, name in np.ndenumerate(names):
            yield Pending(
                name, shape, np.dtype(array.dtype), lambda array=array, index=index, form=form: form.write(np.asarray(array[index]))
            )
