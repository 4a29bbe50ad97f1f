"""One reading of a model's arguments: what is padding, where sequences begin, at which position each token stands."""

from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kda_jax.models.cache import HybridCache
from kda_jax.ops.segments import segments


class Inputs(NamedTuple):
    """What the layers and the embedding need to know of a batch of tokens."""

    tokens: Int[Array, "B T"]
    """Token ids, 0 at padding, so that nothing depends on what padding holds."""
    segment_ids: Int[Array, "B T"] | None
    """As the layers read them (`ops.segments`); None: no padding, one sequence per row."""
    position: Int[Array, "B T"]
    """Index of each token in its own sequence, which may have begun in an earlier call; 0 at padding."""
    added: Int[Array, "B"]
    """Tokens of this call per row, padding not counted."""
    start: Int[Array, "B"]
    """How many of them came before the row's last sequence began; -1 if it began before this call."""


@no_type_check  # its own checks raise ValueError with the name and shape of the argument
def read_inputs(tokens: Int[Array, "B T"], cache: HybridCache | None, segment_ids: Int[Array, "B T"] | None, vocab_size: int) -> Inputs:
    """Check the arguments of a forward and derive what the layers need.

    Args:
        tokens: [B, T] ids.
        cache: of B rows. With one, id 0 of `segment_ids` is padding wherever it stands; without, see `ops.segments`.
        segment_ids: [B, T] or None.
        vocab_size: ids lie in 0..vocab_size-1; checked where they can be seen (not inside jit).
    """
    _check_shapes(tokens, cache, segment_ids)
    B, T = tokens.shape
    offset = 0 if cache is None else (cache.length - cache.start)[:, None]
    if segment_ids is None:
        position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) + offset, (B, T))
        inputs = Inputs(tokens, None, position, jnp.full((B,), T, jnp.int32), jnp.full((B,), -1, jnp.int32))
    else:
        if cache is not None:
            segment_ids = jnp.where(segment_ids == 0, -1, segment_ids)
        seg = segments(segment_ids)
        position = jnp.where(seg.start < 0, seg.index + offset, seg.index - seg.start)
        inputs = Inputs(
            jnp.where(seg.valid, tokens, 0),
            segment_ids,
            jnp.where(seg.valid, position, 0),
            jnp.sum(seg.valid, axis=1, dtype=jnp.int32),
            seg.start[:, -1],
        )
    _check_values(inputs, cache, vocab_size)
    return inputs


def concrete(*arrays) -> bool:
    """Whether the values can be seen: not inside jit, grad, vmap or scan."""
    return not any(isinstance(a, jax.core.Tracer) for a in arrays)


def _check_shapes(tokens, cache: HybridCache | None, segment_ids) -> None:
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T] with T >= 1, got shape {tokens.shape} and dtype {tokens.dtype}")
    if segment_ids is not None and (segment_ids.shape != tokens.shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer)):
        raise ValueError(
            f"segment_ids must be integers of the shape of tokens {tokens.shape}, got shape {segment_ids.shape} and dtype "
            f"{segment_ids.dtype}"
        )
    if cache is not None and cache.batch != tokens.shape[0]:
        raise ValueError(f"cache has {cache.batch} rows and tokens {tokens.shape[0]}: they must be the same")


def _check_values(inputs: Inputs, cache: HybridCache | None, vocab_size: int) -> None:
    if concrete(inputs.tokens):
        tokens = np.asarray(inputs.tokens)  # a constant inside jit can be seen too, but not through jnp, which would trace
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"tokens must lie in 0..{vocab_size - 1}, got ids from {low} to {high}")
    if cache is None or cache.capacity is None:
        return
    if concrete(inputs.added, cache.length):
        longest = int(np.max(np.asarray(cache.length) + np.asarray(inputs.added)))
        if longest > cache.capacity:
            raise ValueError(
                f"cache holds {cache.capacity} tokens per row and this call would make {longest}: use init_cache with a larger max_len"
            )
