"""Writing a checkpoint that transformers loads."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kda_jax.errors import UserError
from kda_jax.hf import mxfp4
from kda_jax.hf.family import Family, source
from kda_jax.hf.files import Pending, by_number, write
from kda_jax.hf.load import FAMILIES
from kda_jax.layers.params import FLOAT32, has_name
from kda_jax.train.state import flatten

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "num_bits": 4,
    "group_size": mxfp4.GROUP,
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*routed_expert_.*", "re:.*mlp\\..*", "re:.*gate$", "lm_head"],
}


def save(
    model: nnx.Module,
    directory: str | Path,
    *,
    dtype: Any = None,
    experts: Literal["plain", "mxfp4"] = "plain",
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `model` as config.json and safetensors files, under the names and in the layouts of the release.

    `load` of what was written gives the same arrays to the bit. The directory appears when it is complete, or not at all.

    Args:
        model: a GPT-2, a Kimi Linear or a Kimi K3.
        directory: made; if it is there, it must be empty.
        dtype: to convert to, except what `layers.params.FLOAT32` names and what the release keeps in float32; None keeps the model's.
        experts: "mxfp4" packs the routed experts of a Kimi K3 as its release does, which must lose nothing.
        max_file_bytes: size of one file, and of what is in host memory at a time. A tensor is never divided.

    Raises:
        UserError: a model without a released form, a directory that is not empty, or experts that MXFP4 does not hold exactly.
    """
    directory = Path(directory)
    family = next((family for family in FAMILIES.values() if type(model.config) is family.config_class), None)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"a {type(model).__name__} has no form that transformers loads; export knows {known}")
    config = family.write_config(model.config)
    refuse_occupied(directory)
    arrays = flatten(nnx.to_pure_dict(nnx.state(model)))
    text = config.get("text_config", config)
    text["dtype"] = jnp.dtype(dtype or arrays[family.embedding].dtype).name
    if experts == "mxfp4":
        text["quantization_config"] = QUANTIZATION
    pending = _pending(family, model, arrays, dtype, experts)
    with Partial(directory) as partial:
        write(partial, sorted(pending, key=lambda tensor: by_number(tensor.name)), max_file_bytes)
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


def _pending(family: Family, model: nnx.Module, arrays: dict[str, Array], dtype: Any, experts: str) -> Iterator[Pending]:
    """Everything to write; each tensor is fetched from the device and converted when its file is."""
    for path, array in arrays.items():
        names, tensor = source(family, model.config, model.stack.layout, path, array.shape)
        keep = dtype is None or has_name(path, FLOAT32) or tensor.stored == "float32"
        kind = np.dtype(array.dtype if keep else jnp.dtype(dtype))
        shape = tensor.form.shape(array.shape[names.ndim :])
        for index, name in np.ndenumerate(names):

            def make(array=array, index=index, tensor=tensor, kind=kind) -> np.ndarray:
                return tensor.form.write(np.asarray(array[index])).astype(kind, copy=False)

            if experts == "mxfp4" and tensor.stored == "mxfp4":
                yield from _packed(family.root + name, shape, make)
            else:
                yield Pending(family.root + name, shape, kind, make)


def _packed(name: str, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> Iterator[Pending]:
    """The two tensors of one weight, packed at once when the first is written."""

    @functools.lru_cache(maxsize=1)
    def both() -> tuple[np.ndarray, np.ndarray]:
        found = mxfp4.pack(make())
        if found is None:
            raise UserError(f"{name} is not exactly what MXFP4 can hold; export it with plain experts")
        return found

    uint8, width = np.dtype(np.uint8), shape[1]
    yield Pending(f"{name}_packed", (shape[0], width // 2), uint8, lambda: both()[0])
    yield Pending(f"{name}_scale", (shape[0], -(-width // mxfp4.GROUP)), uint8, lambda: both()[1])
