"""The checkpoints of tests/hf/fixtures, and ways to change a copy of one."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from kda_jax import hf
from kda_jax.hf.files import INDEX

FIXTURES = Path(__file__).parent / "fixtures"
GPT2, KIMI = FIXTURES / "gpt2", FIXTURES / "kimi_linear"


@functools.cache
def loaded(directory):
    return hf.load(directory)


@functools.cache
def loaded_model(directory):
    return hf.load_model(directory)


@functools.cache
def tensors(directory):
    """All tensors of a directory by name."""
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def config(directory):
    return json.loads((directory / "config.json").read_text())


def write(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def changed(source, directory, *, fields=(), drop=(), add=(), rename=lambda name: name):
    """A copy in one file: config fields replaced (None removes), tensors left out, replaced or renamed."""
    settings = {k: v for k, v in {**config(source), **dict(fields)}.items() if not (k in dict(fields) and v is None)}
    arrays = {rename(name): x for name, x in tensors(source).items() if name not in drop}
    return write(directory, settings, {**arrays, **dict(add)})


def copy(source, directory):
    return Path(shutil.copytree(source, directory))


def index(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def assert_same(a, b):
    """Two trees of arrays, to the bit, dtypes included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), path
