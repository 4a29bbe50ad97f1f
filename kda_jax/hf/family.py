"""What the reader and the writer need to know about a family of models; each family fills this in, in a file of its own."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kda_jax.hf.fields import Fields
from kda_jax.hf.forms import Plain, Stored, Tensor
from kda_jax.models.stack import Layout


class Family(NamedTuple):
    """A family of models in its released form."""

    config_class: type
    read_config: Callable[[Fields], Any]
    """Fields -> our configuration, or None if there are problems."""
    write_config: Callable[[Any], dict]
    """Our configuration -> config.json without the dtype."""
    stack: str
    """Our name of the stack of layers."""
    embedding: str
    """Our name of the token embedding, which is the head as well where that is tied."""
    top: dict[str, Tensor]
    """Arrays outside the layers, by our name."""
    layer_prefix: str
    """What the names in a layer begin with in a release; `{i}` stands for the layer, counted from 0."""
    layer_table: Callable[[Any], dict[str, Tensor]]
    """Configuration -> arrays of a layer, by our name in it. Which of them a layer has is up to its kind."""
    released_name: Callable[[str, Any], str]
    """(name in a file, configuration) -> the release's name: undoes the renamings that files have been seen with."""
    ignored: re.Pattern
    """Released names that hold nothing to load, such as mask buffers."""
    root: str = ""
    """What names in a written file begin with, before the released names here; files without it are read as well."""
    complete: Callable[[Any, Mapping[str, Stored]], Any] = lambda config, tensors: config
    """(configuration, tensors by released name) -> the configuration with what only the tensors say."""


class Source(NamedTuple):
    """Where one array of ours comes from."""

    names: np.ndarray
    """Released names, one per index of our leading axes: none, the stacked layers, the experts, or both."""
    tensor: Tensor
    """How each of them is stored."""

    @property
    def form(self) -> Plain:
        return self.tensor.form


def source(family: Family, config: Any, layout: Layout, path: str, shape: tuple[int, ...]) -> Source:
    """Where the array at the dotted path `path` of a model of `config`, of shape `shape`, comes from.

    Raises:
        KeyError: the family's tables have no such array.
    """
    if path in family.top:
        return Source(np.array(family.top[path].name, object), family.top[path])
    stack, part, position, ours = path.split(".", 3)
    if stack != family.stack:
        raise KeyError(path)
    tensor = family.layer_table(config)[ours]
    names = [family.layer_prefix.format(i=i) + tensor.name for i in _layers(layout, part, int(position))]
    if "{e}" in tensor.name:
        experts = shape[1 if part == "periods" else 0]
        names = [[name.replace("{e}", str(e)) for e in range(experts)] for name in names]
    return Source(np.array(names if part == "periods" else names[0], object), tensor)


def _layers(layout: Layout, part: str, position: int) -> list[int]:
    """The layers that share the block at `position` of a part, in the order of the stacked axis."""
    count = len(layout.prologue) + len(layout.period) * layout.repeats + len(layout.epilogue)
    return [i for i in range(count) if layout.locate(i)[:2] == (part, position)]
