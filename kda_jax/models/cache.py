"""What a model remembers between calls: one cache for every kind of layer, as a plain pytree.

A cache is a value. A forward takes one and returns the next, so keeping the old one *is* the snapshot: decode ahead, keep what was
accepted, go back by using the cache from before (recurrent state, conv history and attention entries all go back together).
A cache passed to a jitted function with donation is gone; copy it first with `jax.tree.map(jnp.copy, cache)`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kda_jax.layers.caches import AttentionCache, LatentCache


class StackCache(NamedTuple):
    """One cache per block of a `Stack`; those of the periods have a leading axis of the number of repeats."""

    prologue: tuple[Any, ...]
    periods: tuple[Any, ...]
    epilogue: tuple[Any, ...]


class HybridCache(NamedTuple):
    """Everything a model carries from one call to the next.

    Made by `model.init_cache`. The leaves of `prologue` and `epilogue` are [B, ...], those of `periods` [repeats, B, ...].
    """

    length: Int[Array, "B"]
    """Tokens seen by each row, padding not counted."""
    start: Int[Array, "B"]
    """How many of them came before the first token of the row's current sequence."""
    prologue: tuple[Any, ...]
    periods: tuple[Any, ...]
    epilogue: tuple[Any, ...]

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def capacity(self) -> int | None:
        """Tokens that a row can hold; None if no layer keeps tokens."""
        for axis, part in ((1, self.prologue), (2, self.periods), (1, self.epilogue)):
            for entry in part:
                if isinstance(entry, AttentionCache | LatentCache):
                    return entry[0].shape[axis]
        return None

    def take(self, rows: Any) -> "HybridCache":
        """The cache of some rows, in that order.

        Args:
            rows: [n] row numbers, seen on the host. Raises ValueError outside 0..B-1 (an index clipped by JAX would share a row).
        """
        rows = _check_rows(rows, self.batch)
        return self._map(lambda leaf: leaf[rows], lambda leaf: leaf[:, rows])

    def put(self, rows: Any, other: "HybridCache") -> "HybridCache":
        """Replace some rows by those of `other`: how a prefilled prompt joins a running batch.

        Args:
            rows: [n] distinct row numbers, seen on the host; row i of `other` goes to rows[i].
            other: a cache of n rows made by the same model with the same `max_len` and dtype.
        """
        rows = _check_rows(rows, self.batch)
        if len(set(rows.tolist())) < len(rows) or len(rows) != other.batch:
            raise ValueError(f"rows must be {other.batch} different row numbers, one per row of the other cache, got {rows.tolist()}")
        mine, theirs = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(c)] for c in (self._shapes(rows), other))
        if mine != theirs:
            raise ValueError(
                "the other cache must come from the same model with the same max_len and dtype: its leaves differ in shape or dtype"
            )
        leading, stacked = (lambda a, b: a.at[rows].set(b)), (lambda a, b: a.at[:, rows].set(b))
        return self._map(leading, stacked, other)

    def reset(self, rows: Any) -> "HybridCache":
        """Empty some rows, as `init_cache` made them: states, conv histories, attention entries and lengths are all zero again.

        Args:
            rows: [n] row numbers, seen on the host. Raises ValueError outside 0..B-1.
        """
        rows = _check_rows(rows, self.batch)
        return self._map(lambda leaf: leaf.at[rows].set(0), lambda leaf: leaf.at[:, rows].set(0))

    def _shapes(self, rows: np.ndarray) -> "HybridCache":
        return jax.eval_shape(lambda cache: cache.take(rows), self)

    def _map(self, leading, stacked, *others: "HybridCache") -> "HybridCache":
        """Apply `leading` to leaves whose first axis is the row, `stacked` to those whose second is."""
        parts = {name: leading for name in self._fields} | {"periods": stacked}
        mapped = {name: jax.tree.map(f, getattr(self, name), *(getattr(o, name) for o in others)) for name, f in parts.items()}
        return HybridCache(**mapped)


def _check_rows(rows: Any, batch: int) -> np.ndarray:
    rows = np.atleast_1d(np.asarray(rows))
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer) or rows.size == 0:
        raise ValueError(f"rows must be a non-empty list of integers, got shape {rows.shape} and dtype {rows.dtype}")
    if rows.min() < 0 or rows.max() >= batch:
        raise ValueError(f"rows must be in 0..{batch - 1}, the rows of this cache, got {rows.tolist()}")
    return rows


def advance(cache: HybridCache, new_tokens: Int[Array, "B"], new_start: Int[Array, "B"], parts: StackCache) -> HybridCache:
    """The cache after `new_tokens` more tokens per row; `new_start` is where, among them, the last sequence began (-1: it went on)."""
    start = jnp.where(new_start >= 0, cache.length + new_start, cache.start)
    return HybridCache(cache.length + new_tokens, start, *parts)
