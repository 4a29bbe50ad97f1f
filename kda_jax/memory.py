"""Bytes of a model at work: weights, cache and state, as one table and one plot; what a hybrid saves, and what it does not."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kda_jax import models, sharding
from kda_jax.layers.params import FLOAT32, has_name
from kda_jax.models.config import KimiLinearConfig, ModelConfig
from kda_jax.models.placement import axes
from kda_jax.train.state import flatten


class Row(NamedTuple):
    """One line of the table."""

    name: str
    total: int
    """Bytes over all devices, copies not counted."""
    device: int
    """Bytes on the device that holds most."""


class Memory(NamedTuple):
    """What a model and the caches of a batch take."""

    rows: tuple[Row, ...]
    parameters: int
    cache_bytes_per_token: int
    """Of one sequence: attention layers only."""
    state_bytes: int
    """Of one sequence: recurrent states, whatever the context."""
    conv_bytes: int
    """Of one sequence: histories of the convolutions."""
    left_whole: tuple[str, ...]
    """A sentence for each kind of parameter axis that the mesh does not divide."""

    @property
    def total(self) -> Row:
        return Row("total", sum(row.total for row in self.rows), sum(row.device for row in self.rows))


class Saving(NamedTuple):
    """A hybrid against the same model with attention in every layer."""

    attention_layers: int
    layers: int
    all_attention_bytes_per_token: int
    share: float
    """Of the cache that grows with the context: 1 - attention layers / layers."""
    crossover_cache: int
    """Tokens at which the attention layers' cache is as large as the states."""
    crossover_saved: int
    """Tokens from which the states are smaller than the cache they stand for: shorter contexts are cheaper with attention everywhere."""


def memory(
    config: ModelConfig, *, batch: int = 1, context: int = 4096, dtype: Any = jnp.bfloat16, mesh: sharding.MeshConfig | None = None
) -> Memory:
    """Bytes to hold `config` and the caches of `batch` sequences of `context` tokens.

    Args:
        config: any model.
        batch: sequences.
        context: tokens of each.
        dtype: of weights, attention cache and convolution histories. Recurrent states and the parameters of `layers.params.FLOAT32` are
            float32 whatever it is.
        mesh: parameters go where `kda_jax.sharding` puts them; rows are split over data, fsdp and expert, heads over tensor.

    Example:
        >>> from kda_jax import models
        >>> from kda_jax.memory import memory
        >>> found = memory(models.presets.kimi_linear_48b_a3b(), context=1_000_000)
        >>> found.cache_bytes_per_token, found.state_bytes
        (8064, 41943040)
    """
    mesh = mesh or sharding.MeshConfig()
    model = nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    abstract = jax.sharding.AbstractMesh(mesh.shape, sharding.AXES)
    names, width = axes(model), jnp.dtype(dtype).itemsize
    weights = {"experts": [0, 0], "others": [0, 0]}
    leaves = flatten(nnx.to_pure_dict(nnx.state(model)))
    report = sharding.parameter_report(abstract, {path: (names[path], leaf.shape) for path, leaf in leaves.items()})
    left_whole = dict.fromkeys(line.partition(": ")[2] for line in report)  # once, whichever parameters it is about
    for path, leaf in leaves.items():
        size = 4 if has_name(path, FLOAT32) else width
        part = sharding.parameter_sharding(abstract, names[path], leaf.shape).shard_shape(leaf.shape)
        kind = weights["experts" if has_name(path, ("experts",)) else "others"]
        kind[0] += math.prod(leaf.shape) * size
        kind[1] += math.prod(part) * size
    count = models.count(config, dtype=dtype)
    here = -(-batch // mesh.row_parts)
    tensor = mesh.tensor

    def cache(name: str, bytes_per_sequence: int, split: int) -> Row:
        return Row(name, batch * bytes_per_sequence, here * -(-bytes_per_sequence // split))

    shared = isinstance(config, KimiLinearConfig)  # the latent belongs to all heads, keys and values to one
    rows = [Row("weights, routed experts", *weights["experts"])] if weights["experts"][0] else []
    rows.append(Row("weights" + (", all else" if rows else ""), *weights["others"]))
    rows += [cache("recurrent states, float32", count.state_bytes, tensor), cache("convolution histories", count.conv_bytes, tensor)]
    rows.append(cache(f"attention cache of {context:,} tokens", context * count.cache_bytes_per_token, 1 if shared else tensor))
    return Memory(tuple(rows), count.total, count.cache_bytes_per_token, count.state_bytes, count.conv_bytes, tuple(left_whole))


def saving(config: KimiLinearConfig, dtype: Any = jnp.bfloat16) -> Saving:
    """What the recurrent layers of a hybrid save: the arithmetic behind "KV cache down by up to 75%" (arXiv 2510.26692).

    Example:
        >>> from kda_jax import models
        >>> from kda_jax.memory import saving
        >>> found = saving(models.presets.kimi_linear_48b_a3b())
        >>> f"{found.share:.1%}", found.all_attention_bytes_per_token, found.crossover_cache, found.crossover_saved
        ('74.1%', 31104, 5202, 1821)
    """
    count = models.count(config, dtype=dtype)
    layers, attention = config.num_hidden_layers, len(config.linear_attn_config.full_attn_layers)
    each = count.cache_bytes_per_token // max(attention, 1)
    recurrent = layers - attention
    return Saving(
        attention,
        layers,
        layers * each,
        1 - attention / layers,
        -(-count.state_bytes // max(count.cache_bytes_per_token, 1)),
        -(-count.state_bytes // max(recurrent * each, 1)),
    )


def sentences(config: ModelConfig, found: Memory, context: int, dtype: Any) -> list[str]:
    """What the table says, and what it does not."""
    lines = list(found.left_whole)
    lines.append(f"per token and sequence {found.cache_bytes_per_token:,} B, per sequence {found.state_bytes + found.conv_bytes:,} B")
    if not isinstance(config, KimiLinearConfig):
        return lines
    s = saving(config, dtype)
    lines.append(
        f"{s.attention_layers} of {s.layers} layers keep tokens: {found.cache_bytes_per_token:,} B a token, where {s.layers} attention "
        f"layers would keep {s.all_attention_bytes_per_token:,}: {s.share:.1%} less"
    )
    lines.append(
        f"the states are worth {s.crossover_cache:,} tokens of that cache; below {s.crossover_saved:,} tokens they are larger than the "
        "cache they stand for"
    )
    weights = sum(row.total for row in found.rows if row.name.startswith("weights"))
    one = found.state_bytes + found.conv_bytes + context * found.cache_bytes_per_token
    without = context * s.all_attention_bytes_per_token
    lines.append(
        f"not covered: the weights, {weights:,} B, do not shrink; with them one sequence of {context:,} tokens takes "
        f"{1 - (weights + one) / (weights + without):.1%} less than with attention in every layer"
    )
    return lines


def plot(config: ModelConfig, path: Path, *, batch: int, dtype: Any) -> None:
    """Bytes against context, 256 to a million tokens, to an image file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    contexts = np.geomspace(256, 2**20, 49)
    found = memory(config, batch=batch, context=1, dtype=dtype)
    weights = sum(row.total for row in found.rows if row.name.startswith("weights"))
    fixed = batch * (found.state_bytes + found.conv_bytes)
    figure, ax = plt.subplots(figsize=(7, 4.5))
    ax.loglog(contexts, fixed + batch * contexts * found.cache_bytes_per_token, label="states and cache")
    if isinstance(config, KimiLinearConfig):
        s = saving(config, dtype)
        ax.loglog(contexts, batch * contexts * s.all_attention_bytes_per_token, label=f"cache, attention in all {s.layers} layers")
        ax.axvline(s.crossover_saved, color="grey", linewidth=0.8)
        ax.annotate(f" {s.crossover_saved:,}", (s.crossover_saved, ax.get_ylim()[0]), va="bottom", color="grey")
    if fixed:
        ax.axhline(fixed, linestyle=":", color="grey", label="states alone")
    ax.axhline(weights, linestyle="--", color="black", label="weights")
    ax.set_xlabel("context, tokens")
    ax.set_ylabel(f"bytes, batch {batch}, {jnp.dtype(dtype).name}")
    ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def mesh_of(text: str) -> sharding.MeshConfig:
    """ "fsdp=8,tensor=2" as a MeshConfig. Raises ValueError for an unknown axis, one given twice or a size that is no number."""
    known = {field.name for field in dataclasses.fields(sharding.MeshConfig)} - {"axis_type"}
    sizes = {}
    for part in filter(None, text.split(",")):
        axis, equals, size = part.partition("=")
        if axis not in known or not equals or not size.isdecimal():
            raise ValueError(f"{part!r} is not AXIS=SIZE with an axis of {', '.join(sharding.AXES)}")
        if axis in sizes:
            raise ValueError(f"{text!r} has {axis} twice")
        sizes[axis] = int(size)
    return sharding.MeshConfig(**sizes)
