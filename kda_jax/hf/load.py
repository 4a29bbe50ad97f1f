"""Reading a Hugging Face checkpoint into our arrays, checked in both directions before anything is read."""

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kda_jax import models
from kda_jax.errors import nearest
from kda_jax.hf import gpt2, kimi_k3, kimi_linear, mxfp4
from kda_jax.hf.family import Family, Source, source
from kda_jax.hf.fields import Fields
from kda_jax.hf.files import PACKED, SCALE, Tensor, by_number, tensors
from kda_jax.hf.forms import At
from kda_jax.hf.problems import BadCheckpoint
from kda_jax.layers.params import FLOAT32, has_name
from kda_jax.models.config import GPT2Config, ModelConfig
from kda_jax.train.state import flatten, state_shardings, unflatten

FAMILIES: dict[str, Family] = {"gpt2": gpt2.FAMILY, "kimi_linear": kimi_linear.FAMILY, "kimi_k3": kimi_k3.FAMILY}
Read = Tensor | mxfp4.Packed
_THREADS = min(8, os.cpu_count() or 1)


class Loaded(NamedTuple):
    config: ModelConfig
    params: dict
    """Every array of the model, router biases included, nested by module: `nnx.merge(graphdef, params)` takes it."""


class Checkpoint(NamedTuple):
    """A directory that holds exactly what its model needs; nothing but headers has been read."""

    config: ModelConfig
    sources: dict[str, Source]
    """By the dotted path of each of our arrays."""
    tensors: dict[str, Read]
    """By released name."""
    ignored: tuple[str, ...]
    """Names in the files that hold nothing to load."""
    graphdef: nnx.GraphDef
    abstract: dict
    """Shapes of our arrays, nested as `Loaded.params`."""


def load(directory: str | Path, *, dtype: Any = None, shardings: Mapping[str, jax.sharding.Sharding] | None = None) -> Loaded:
    """The configuration and the arrays of a checkpoint in Hugging Face form: GPT-2, Kimi Linear or Kimi K3 (text).

    Tensors are read a piece at a time into their place in the array (or the part of the array) that a device holds, transposed and cast
    on the way, by several threads; next to what is loaded, memory holds a few pieces, and one part where the device is not the CPU.
    Packed experts (MXFP4) become bfloat16.

    Args:
        directory: config.json and safetensors files, with an index or without.
        dtype: to convert to, except what `layers.params.FLOAT32` names; None keeps the dtype of the files. Where layers that share
            an array differ, it has the wider one.
        shardings: by the dotted path of an array; the others, and all if None, go to the default device.

    Raises:
        BadCheckpoint: with every problem of the directory: fields of config.json that are unknown or ask for what is not implemented;
            tensors that are missing, left over, or of another shape; files that are absent or truncated.
    """
    checkpoint = inspect(directory)
    return Loaded(checkpoint.config, _read_all(checkpoint, dtype, shardings or {}))


def load_model(directory: str | Path, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None) -> nnx.Module:
    """As `load`, but the model, ready to call, and on `mesh` if there is one."""
    checkpoint = inspect(directory)
    shardings = {} if mesh is None else state_shardings(_abstract(checkpoint.config), flatten(checkpoint.abstract), mesh)
    return nnx.merge(checkpoint.graphdef, _read_all(checkpoint, dtype, shardings))


def inspect(directory: str | Path) -> Checkpoint:
    """What is in a checkpoint, read from config.json and the headers alone. Raises BadCheckpoint as `load` does."""
    directory, problems = Path(directory), []
    raw = _read_json(directory, problems)
    family = None if raw is None else _family(raw)
    if raw is not None and family is None:
        kind = raw.get("model_type")
        problems.append(f"config.json: model_type is {kind!r}, expected {' or '.join(FAMILIES)}{nearest(str(kind), FAMILIES)}")
    config = None
    if family is not None:
        fields = Fields(raw, problems)
        config = family.read_config(fields)
        fields.close()
    found = _paired(tensors(directory, problems), problems)
    if config is None or not found:
        raise BadCheckpoint(directory, problems)
    by_name, ignored = _names(found, family, config, problems)
    config = family.complete(config, by_name)
    abstract_model = _abstract(config)
    graphdef, state = nnx.split(abstract_model)
    abstract = nnx.to_pure_dict(state)
    layout = abstract_model.stack.layout
    sources = {path: source(family, config, layout, path, leaf.shape) for path, leaf in flatten(abstract).items()}
    _check(sources, flatten(abstract), by_name, problems)
    if problems:
        raise BadCheckpoint(directory, problems)
    return Checkpoint(config, sources, by_name, ignored, graphdef, abstract)


def _family(raw: dict) -> Family | None:
    kind = raw.get("model_type")
    return kimi_k3.FAMILY if kind == "kimi_linear" and kimi_k3.is_text_config(raw) else FAMILIES.get(kind)


def _paired(found: list[Tensor], problems: list[str]) -> list[Read]:
    """The tensors, with the two halves of every packed weight as one, under the name that the weight has unpacked."""
    scales = {tensor.name.removesuffix(SCALE): tensor for tensor in found if tensor.name.endswith(SCALE)}
    paired: list[Read] = []
    for tensor in found:
        if tensor.name.endswith(PACKED):
            scale = scales.pop(tensor.name.removesuffix(PACKED), None)
            paired += mxfp4.pair(tensor, scale, problems)
        elif not tensor.name.endswith(SCALE):
            paired.append(tensor)
    problems += [f"{scale.name} has no {name}{PACKED} beside it" for name, scale in scales.items()]
    return paired


@functools.lru_cache(maxsize=4)
def _abstract(config: ModelConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))


def _read_json(directory: Path, problems: list[str]) -> dict | None:
    try:
        raw = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        problems.append(f"config.json cannot be read ({error})")
        return None
    if isinstance(raw, dict):
        return raw
    problems.append("config.json is not an object")
    return None


def _names(found: list[Read], family: Family, config: ModelConfig, problems: list[str]) -> tuple[dict[str, Read], tuple[str, ...]]:
    """Tensors by released name, and the names in the files that are ignored."""
    by_name: dict[str, Read] = {}
    ignored = []
    for tensor in found:
        name = family.released_name(tensor.name, config)
        if family.ignored.fullmatch(name):
            ignored.append(tensor.name)
        elif name in by_name:
            problems.append(
                f"{by_name[name].name} in {by_name[name].file.name} and {tensor.name} in {tensor.file.name} are the same tensor"
            )
        else:
            by_name[name] = tensor
    head = by_name.pop("lm_head.weight", None) if _is_tied(config) else None
    if head is not None:
        ignored.append(head.name)
        embedding = by_name.get(family.top[family.embedding].name)
        if embedding is not None and not _equal(head, embedding):
            problems.append(f"{head.name} differs from {embedding.name}, though the model ties them")
    return by_name, tuple(ignored)


def _is_tied(config: ModelConfig) -> bool:
    return isinstance(config, GPT2Config) or config.tie_word_embeddings


def _equal(a: Read, b: Read, rows: int = 4096) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    parts = [(slice(at, min(at + rows, a.shape[0])), slice(None)) for at in range(0, a.shape[0], rows)]
    return all(np.array_equal(a[part], b[part]) for part in parts)


def _check(sources: dict[str, Source], ours: dict[str, Any], found: dict[str, Read], problems: list[str]) -> None:
    """Both directions: every array of ours filled with tensors of the right shape, every tensor used."""
    wanted = {name: (tensor.form, ours[path].shape[names.ndim :]) for path, (names, tensor) in sources.items() for name in names.flat}
    few = len(found.keys() - wanted.keys()) < 10  # finding the nearest of twenty thousand names takes a while
    for name in sorted(wanted.keys() | found.keys(), key=by_number):
        tensor = found.get(name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif name not in wanted:
            problems.append(f"{tensor.name} is not part of the model{nearest(name, wanted, 1) if few else ''}")
        else:
            form, shape = wanted[name]
            if not form.accepts(tensor.shape, shape):
                problems.append(f"{tensor.name} has shape {tensor.shape}, expected {form.shape(shape)}")
            elif (sentence := form.problem(tensor, shape)) is not None:
                problems.append(f"{tensor.name} {sentence}")


def _read_all(checkpoint: Checkpoint, dtype: Any, shardings: Mapping[str, jax.sharding.Sharding]) -> dict:
    leaves = {}
    for path, leaf in flatten(checkpoint.abstract).items():
        names = checkpoint.sources[path].names
        kept = np.result_type(*{checkpoint.tensors[name].dtype for name in names.flat})
        wanted = kept if dtype is None or has_name(path, FLOAT32) else jnp.dtype(dtype)
        leaves[path] = _read(checkpoint, path, leaf.shape, wanted, shardings.get(path))
    return unflatten(checkpoint.abstract, leaves)


def _read(checkpoint: Checkpoint, path: str, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None) -> Array:
    """One of our arrays. A part that several devices hold is read once."""
    if sharding is None:
        return jax.device_put(_part(checkpoint, path, shape, tuple(slice(0, n) for n in shape), dtype))
    holders: dict[tuple, list[jax.Device]] = {}
    for device, at in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(n)[:2] for part, n in zip(at, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        part = _part(checkpoint, path, shape, tuple(slice(*pair) for pair in bounds), dtype)
        pieces += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _part(checkpoint: Checkpoint, path: str, shape: tuple[int, ...], at: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """The part `at` of one of our arrays, as `dtype`; its tensors are read, transposed and cast in pieces, by several threads."""
    names, tensor = checkpoint.sources[path]
    lead, rest = at[: names.ndim], at[names.ndim :]
    part = _aligned([s.stop - s.start for s in at], dtype)

    def fill(to: np.ndarray, stored: Read, piece: At) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # a cast to infinity or of a NaN is silent, as on a device
            tensor.form.fill(to, stored, shape[names.ndim :], piece)

    with ThreadPoolExecutor(_THREADS) as threads:
        reading = [
            threads.submit(fill, to, stored, piece)
            for index, name in np.ndenumerate(names[lead])
            for stored in [checkpoint.tensors[name].reading(dtype)]
            for to, piece in tensor.form.pieces(part[index] if index else part, rest, stored.expansion)
        ]
        for done in reading:
            done.result()
    return part


def _aligned(shape: Sequence[int], dtype: np.dtype, boundary: int = 64) -> np.ndarray:
    """An empty array that begins at a multiple of `boundary`, which JAX takes over on a CPU without copying it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + boundary, np.uint8)
    start = -raw.ctypes.data % boundary
    return raw[start : start + size].view(dtype).reshape(shape)
