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
from kda_jax.hf import kimi_k3
from kda_jax.hf.files import INDEX, SCALE
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


def packed(directory, experts, width=3072, latent=3584):
    """The smallest Kimi K3, but three layers of it with packed experts of this size (that of the release if none is given), at random."""
    config = presets.tiny_k3()
    linear = dataclasses.replace(config.linear_attn_config, kda_layers=(1, 2, 4), full_attn_layers=(3,))
    config = dataclasses.replace(config, num_hidden_layers=4, linear_attn_config=linear)
    config = dataclasses.replace(config, num_experts=experts, moe_intermediate_size=width, routed_expert_hidden_size=latent)
    rng = np.random.default_rng(0)

    def values(tensor):
        smallest, largest = (110, 126) if tensor.name.endswith(SCALE) else (0, 256)
        return rng.integers(smallest, largest, tensor.shape, np.uint8) if tensor.dtype == np.uint8 else np.zeros(tensor.shape, tensor.dtype)

    return write(directory, kimi_k3.write_config(config), {tensor.name: values(tensor) for tensor in hf.released(config)})


def index(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def assert_same(a, b):
    """Two trees of arrays, to the bit, dtypes included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), path
