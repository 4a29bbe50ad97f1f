"""Which parameters stay float32, which are not decayed, and which are matrices, by name: the only places where a parameter is special."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

FLOAT32 = frozenset({"A_log", "dt_bias", "D", "e_score_correction_bias"})
"""Never cast down: gates and the router's correction bias lose what they are for in 16 bits."""

NO_DECAY = FLOAT32 | {"scale", "bias"}
"""No weight decay: the above, the scales of norms, and biases. Names, not ranks: stacking layers adds an axis to every one of them."""

MATRIX = frozenset({"kernel", "w1", "w2", "w3"})
"""Weights that map one space of features to another, but for the convolutions and the head below. Names again: the stacked scales of
norms have two axes as well, and the taps of a depthwise convolution are no map."""

_NO_MATRIX = frozenset({"conv1d", "q_conv1d", "k_conv1d", "v_conv1d", "lm_head"})


def has_name(path: str | Sequence[Any], names: Collection[str]) -> bool:
    """Whether a parameter is one of `names`.

    Args:
        path: of the parameter: "blocks.0.mixer.A_log", a tuple of keys, or a path from `jax.tree_util`.
        names: FLOAT32 or NO_DECAY.
    """
    return any(_key(entry) in names for entry in (path.split(".") if isinstance(path, str) else path))


def cast(params: Any, dtype: Any) -> Any:
    """Floating-point leaves in `dtype`, those of FLOAT32 as they are. `params` is any tree whose paths hold the names."""

    def one(path, leaf):
        keep = has_name(path, FLOAT32) or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf if keep else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def decay_mask(params: Any, exempt: Collection[str] = ()) -> Any:
    """The tree of `params` with True where weight decay applies: everywhere but NO_DECAY and the names in `exempt`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not has_name(path, {*NO_DECAY, *exempt}), params)


def is_matrix(path: Sequence[Any]) -> bool:
    """Whether the last two axes of a parameter are those of a matrix, and axes before them count matrices (experts, stacked layers)."""
    return _key(path[-1]) in MATRIX and not has_name(path, _NO_MATRIX)


def _key(entry: Any) -> Any:
    """The key of a path entry: DictKey has `key`, GetAttrKey has `name`, a plain key is itself."""
    return getattr(entry, "key", getattr(entry, "name", entry))
