"""What mixers carry from call to call: plain pytrees that a call takes and returns anew."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.segments import segments


class MixerOutput(NamedTuple):
    """y [B, T, D], the cache after these tokens, and max_logits [H] of a mixer with scores."""

    y: Float[Array, "B T D"]
    cache: Any
    """The cache after these tokens; None if none was given."""
    max_logits: Float[Array, "H"] | None = None
    """Largest attention score of each head, where the mixer has such scores and no cache was given: what QK-clip goes by."""


class RecurrentCache(NamedTuple):
    """All that a recurrent mixer remembers, whatever the length of the sequence."""

    state: Float[Array, "B HV K V"]
    """float32."""
    conv: Float[Array, "B W1 D"] | None
    """The last W - 1 inputs of the short convolutions, oldest first, all channels side by side; None if the mixer has none."""


class AttentionCache(NamedTuple):
    """Keys and values of every token so far. Slot n of row b holds that row's valid token number n: no holes, whatever the padding."""

    k: Float[Array, "B S H K"]
    v: Float[Array, "B S H V"]
    length: Int[Array, "B"]
    """Slots in use."""
    start: Int[Array, "B"]
    """Slot where the row's current sequence began."""


class LatentCache(NamedTuple):
    """The latent [c | k_r] of every token so far, laid out like `AttentionCache`."""

    latent: Float[Array, "B S RP"]
    length: Int[Array, "B"]
    start: Int[Array, "B"]


class Placement(NamedTuple):
    """Where the tokens of a call go in a cache, and what they may see there."""

    slot: Int[Array, "B T"]
    """Slot of each token; out of range at padding, so that it is dropped."""
    q_index: Int[Array, "B T"]
    """The same with -1 at padding, as `ops.attention` takes it."""
    start: Int[Array, "B T"]
    """First slot of each token's sequence."""
    new_length: Int[Array, "B"]
    new_start: Int[Array, "B"]


def place(cache: AttentionCache | LatentCache, tokens: int, segment_ids: Int[Array, "B T"] | None) -> Placement:
    """Give the tokens of a call the next free slots of their rows, padding left out.

    Tokens beyond the capacity get slots out of range and are dropped, never clipped into the slot of another token; the caller
    who can see lengths must refuse them before.
    """
    length, start = cache.length[:, None], cache.start[:, None]
    if segment_ids is None:
        slot = length + jnp.arange(tokens, dtype=length.dtype)
        return Placement(slot, slot, jnp.broadcast_to(start, slot.shape), cache.length + tokens, cache.start)
    seg = segments(segment_ids)
    starts = jnp.where(seg.start < 0, start, length + seg.start)
    slot = jnp.where(seg.valid, length + seg.index, jnp.iinfo(length.dtype).max)
    q_index = jnp.where(seg.valid, slot, -1)
    return Placement(slot, q_index, starts, cache.length + jnp.sum(seg.valid, axis=1, dtype=length.dtype), starts[:, -1])


def write(buffer: Float[Array, "B S ..."], new: Float[Array, "B T ..."], slot: Int[Array, "B T"]) -> Float[Array, "B S ..."]:
    """The buffer with every token in its slot, in the buffer's dtype; slots out of range are dropped."""
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, slot].set(new.astype(buffer.dtype), mode="drop")
