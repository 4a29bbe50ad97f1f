"""Depthwise causal convolution over a few tokens, with the history it carries between calls."""

import typing
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.segments import Segments, segments
from kda_jax.ops.spec import need_floats, need_integers
from kda_jax.sharding import Shards, local_map, parts


class ConvOutput(NamedTuple):
    """y [B, T, D] and final_state [B, W - 1, D]."""

    y: Float[Array, "B T D"]
    final_state: Float[Array, "B W1 D"]
    """The last W - 1 inputs (before the activation), oldest first: the `initial_state` of the next call."""


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def short_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, "D"] | None = None,
    *,
    initial_state: Float[Array, "B W1 D"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    activation: Literal["silu"] | None = "silu",
) -> ConvOutput:
    """y_t = activation(bias + sum_j weight[:, j] * x_{t-(W-1)+j}), each channel on its own.

    The last tap is the current token. The window skips padding, so that a padded row equals the unpadded one, and starts
    empty (zeros) at every new sequence of a packed row.

    Args:
        x: [B, T, D].
        weight: [D, W].
        bias: [D].
        initial_state: [B, W-1, D], the inputs just before x, oldest first; zeros if None. It belongs to each row's first sequence.
        segment_ids: [B, T]; see `ops.segments`.
        activation: "silu" or None.

    Returns:
        y [B, T, D] in x's dtype, zero at padding; final_state [B, W-1, D] in the dtype of `initial_state` (x's if None), with
        zeros for tokens before the start of the row's last sequence.

    Raises:
        ValueError: a shape that does not fit, or an unknown activation.

    Numerics: the sum and the activation are float32, rounded once.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> y, history = ops.short_conv(jnp.ones((1, 3, 2)), jnp.ones((2, 4)), activation=None)
        >>> y[0, :, 0].tolist(), history.shape
        ([1.0, 2.0, 3.0], (1, 3, 2))
    """
    _check(x, weight, bias, initial_state, segment_ids, activation)
    B, T, D = x.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, weight.shape[1] - 1, D), x.dtype)
    if segment_ids is None:
        history = jnp.concatenate([initial_state, x.astype(initial_state.dtype)], axis=1)
        return ConvOutput(_convolve(x, initial_state, weight, bias, activation, start=None), history[:, T:])

    seg = segments(segment_ids)
    dense = jnp.all(~seg.valid | (seg.index == jnp.arange(T)))  # no padding before a token: nothing to move
    packed = jax.lax.cond(dense, lambda: _drop_padding(x, seg), lambda: _compact(x, seg))
    start = _compact(seg.start[..., None], seg)[..., 0]
    y = _convolve(packed, initial_state, weight, bias, activation, start)
    y = jax.lax.cond(dense, lambda: y, lambda: jnp.take_along_axis(y, seg.index[..., None], axis=1))
    return ConvOutput(jnp.where(seg.valid[..., None], y, 0), _final_state(initial_state, packed, seg))


def _check(x, weight, bias, initial_state, segment_ids, activation) -> None:
    """One sentence for an argument of another shape or dtype."""
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    need_floats("short_conv", {name: a for name, a in given.items() if a is not None or name in ("x", "weight")})
    need_integers("short_conv", dict(segment_ids=segment_ids))
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}; expected [B, T, D]")
    B, T, D = x.shape
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {weight.shape}; expected ({D}, W) with W at least 1, for x of shape {x.shape}")
    expected = {"bias": (bias, (D,)), "segment_ids": (segment_ids, (B, T)), "initial_state": (initial_state, (B, weight.shape[1] - 1, D))}
    for name, (a, shape) in expected.items():
        if a is not None and a.shape != shape:
            raise ValueError(f"{name} has shape {a.shape}; expected {shape}")
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; expected 'silu' or None")


def _convolve(x: Array, history: Array, weight: Array, bias: Array | None, activation: str | None, start: Array | None) -> Array:
    """Sum of the W shifted windows. `start` [B, T]: index of the first token of each token's sequence, negative for the row's first.

    Where time is split over devices, each takes the W - 1 inputs before its own from its neighbour.
    """
    halo = weight.shape[1] - 1

    def local(shards: Shards, x, history, weight, bias, start):
        T, index = x.shape[1], shards.index("time")
        if shards.count("time") > 1 and halo:
            history = jnp.where(index == 0, history.astype(x.dtype), shards.before(x[:, T - halo :], "time"))
        window = jnp.concatenate([history.astype(x.dtype), x], axis=1)
        return _windows(window, weight, bias, activation, start, index * T)

    tokens = "batch", "time", "heads"
    names = tokens, ("batch", None, "heads"), ("heads", None), ("heads",), ("batch", "time")
    whole = ("time",) if x.shape[1] < halo * parts("time", x.shape[1]) else ()
    return local_map(local, (x, history, weight, bias, start), names, tokens, whole)


def _windows(window: Array, weight: Array, bias: Array | None, activation: str | None, start: Array | None, first: Array | int) -> Array:
    """`window` [B, W - 1 + T, D]; `first` is the index of its first token after the history."""
    W = weight.shape[1]
    T = window.shape[1] - (W - 1)
    wide = jnp.promote_types(window.dtype, jnp.float32)
    y = jnp.zeros((), wide) if bias is None else bias.astype(wide)
    for tap in range(W):
        term = window[:, tap : tap + T].astype(wide) * weight[:, tap].astype(wide)
        if start is not None:
            source = first + jnp.arange(T) - (W - 1 - tap)
            term = jnp.where(((start < 0) | (source >= start))[..., None], term, 0)
        y = y + term
    if activation == "silu":
        y = jax.nn.silu(y)
    return y.astype(window.dtype)


def _drop_padding(x: Array, seg: Segments) -> Array:
    return jnp.where(seg.valid[..., None], x, 0)


def _compact(x: Array, seg: Segments) -> Array:
    """Move the valid tokens of each row to its front, in order; zeros behind them. Row by row, so that rows stay where they are."""
    T = x.shape[1]
    slot = jnp.where(seg.valid, seg.index, T + jnp.arange(T))  # out of range: dropped
    return jax.vmap(lambda x, slot: jnp.zeros_like(x).at[slot].set(x, mode="drop", unique_indices=True))(x, slot)


def _final_state(initial_state: Array, packed: Array, seg: Segments) -> Array:
    """The last W - 1 inputs of each row's last sequence."""
    count = jnp.sum(seg.valid, axis=1, dtype=jnp.int32)[:, None]
    source = count - initial_state.shape[1] + jnp.arange(initial_state.shape[1])  # [B, W-1], negative: from initial_state
    history = jnp.concatenate([initial_state, packed.astype(initial_state.dtype)], axis=1)
    state = jnp.take_along_axis(history, (source + initial_state.shape[1])[..., None], axis=1)
    start = jnp.max(seg.start, axis=1, keepdims=True)
    return jnp.where(((start < 0) | (source >= start))[..., None], state, 0)
