"""Where sequences begin and which tokens are padding: one reading of `segment_ids` for every op."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Segments(NamedTuple):
    """What an op needs to know of each position of a packed or padded batch."""

    valid: Bool[Array, "B T"]
    """A real token; everything else is padding, which changes nothing around it."""
    reset: Bool[Array, "B T"]
    """First token of a sequence that is not the first sequence of its row."""
    index: Int[Array, "B T"]
    """Number of valid tokens before this position in its row."""
    start: Int[Array, "B T"]
    """`index` of the first token of this token's sequence; -1 in the row's first sequence, which continues what was carried in."""


def segments(segment_ids: Int[Array, "B T"]) -> Segments:
    """Read packed rows: a new id starts a new sequence.

    A negative id is padding. Id 0 is padding once a positive id has appeared earlier in its row, which is how packers write the
    tail of a row; a leading run of zeros is a sequence of its own, so ids that count from 0 work as well. Padding between two
    runs of the same id does not end the sequence.

    Args:
        segment_ids: [B, T] integers.
    """
    seen_positive = jax.lax.cummax((segment_ids > 0).astype(jnp.int32), axis=1)
    valid = (segment_ids > 0) | ((segment_ids == 0) & (seen_positive == 0))
    index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    # Position of the last valid token before t, or -1: its id is the one to compare with.
    position = jnp.where(valid, jnp.arange(segment_ids.shape[1]), -1)
    before = jnp.pad(jax.lax.cummax(position, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    reset = valid & (before >= 0) & (previous != segment_ids)
    start = jax.lax.cummax(jnp.where(reset, index, -1), axis=1)
    return Segments(valid, reset, index, start)
