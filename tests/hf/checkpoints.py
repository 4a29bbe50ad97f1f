"""The checkpoints of tests/hf/fixtures, and ways to change a copy of one."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from kda_jax import hf, models
from kda_jax.hf.files import INDEX
from kda_jax.models import presets

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


def large(directory):
    """A Kimi Linear of 340 MB, zeros in bfloat16, most of it experts of half a megabyte, in several files."""
    config = dataclasses.replace(presets.tiny_hybrid(), vocab_size=16384, hidden_size=512, num_experts=64, moe_intermediate_size=512)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0))))
    model = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), state))
    hf.save(model, directory, max_file_bytes=10**8)
    return directory


def index(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def assert_same(a, b):
    """Two trees of arrays, to the bit, dtypes included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), path
