"""Which parameters stay float32 and which are not decayed, by name: the only two places where a parameter is special."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

FLOAT32 = frozenset({"A_log", "dt_bias", "D", "e_score_correction_bias"})
"""Never cast down: gates and the router's correction bias lose what they are for in 16 bits."""

NO_DECAY = FLOAT32 | {"scale", "bias"}
"""No weight decay: the above, the scales of norms, and biases. Names, not ranks: stacking layers adds an axis to every one of them."""


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


def decay_mask(params: Any) -> Any:
    """The tree of `params` with True where weight decay applies."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not has_name(path, NO_DECAY), params)


def _key(entry: Any) -> Any:
    """The key of a path entry: DictKey has `key`, GetAttrKey has `name`, a plain key is itself."""
    return getattr(entry, "key", getattr(entry, "name", entry))
