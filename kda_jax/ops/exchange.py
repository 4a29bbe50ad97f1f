"""Rows to the devices that own their experts, and back: the all-to-all of expert parallelism (GShard, arXiv 2006.16668).

Every device sorts its M rows by expert; a device owns consecutive experts, so what goes to one owner lies together. An owner has a slot
of R rows for each sender: M, which is all that could come, unless the routing was limited.

    sender s    rows for owner 0 | rows for owner 1 | ...
    owner d     slot of sender 0: its rows for d, then room | slot of sender 1 | ...

Two ways to the same slots: a ragged all-to-all moves only rows; where there is none (CPUs) whole slots move.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class _Static(NamedTuple):
    axes: tuple[str, ...]
    rows: int
    """M."""
    room: int
    """R."""


def at_owners(
    compute: Callable[[Array, Array], Array], axes: tuple[str, ...], rows: Float[Array, "M D"], counts: Int[Array, "E"], room: int
) -> Float[Array, "M D"]:
    """`compute` where the experts are. Call inside `jax.shard_map`, on each of P devices.

    Args:
        compute: (rows sorted by expert, rows of each owned expert) -> results, in the same order; zeros after the last row.
        axes: mesh axes over which the experts are split.
        rows: sorted by expert; rows of no expert last.
        counts: rows of each of all experts.
        room: rows that an owner has room for from one sender, at least as many as any can have for it.

    Returns:
        the result of each row, zero for those of no expert.
    """
    static = _Static(axes, rows.shape[0], room)
    table = jax.lax.all_gather(counts, axes)  # [P, E]: rows of each sender for each expert
    P, here = table.shape[0], jax.lax.axis_index(axes)
    owned = jax.lax.dynamic_index_in_dim(table.reshape(P, P, -1), here, axis=1, keepdims=False)  # [P, E/P]: for the experts here
    received = _send(static, rows, table)
    expert = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(room), side="right"))(jnp.cumsum(owned, axis=1)).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    results = compute(received[order], jnp.sum(owned, axis=0))
    return _send_back(static, jnp.zeros_like(results).at[order].set(results, unique_indices=True), table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(static: _Static, rows: Float[Array, "M D"], table: Int[Array, "P E"]) -> Float[Array, "PR D"]:
    """Each row to the slot that its owner keeps for this device."""
    dense, ragged = (functools.partial(f, static) for f in (_send_dense, _send_ragged))
    return jax.lax.platform_dependent(rows, table, cpu=dense, default=ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_back(static: _Static, slots: Float[Array, "PR D"], table: Int[Array, "P E"]) -> Float[Array, "M D"]:
    """The rows of each slot to the device that sent them, in its order. The transpose of `_send`."""
    dense, ragged = (functools.partial(f, static) for f in (_send_back_dense, _send_back_ragged))
    return jax.lax.platform_dependent(slots, table, cpu=dense, default=ragged)


_send.defvjp(lambda static, rows, table: (_send(static, rows, table), table), lambda static, table, d: (_send_back(static, d, table), None))
_send_back.defvjp(
    lambda static, slots, table: (_send_back(static, slots, table), table), lambda static, table, d: (_send(static, d, table), None)
)


def _sizes(table: Int[Array, "P E"]) -> tuple[Int[Array, "P P"], Int[Array, "P P"]]:
    """[s, d]: how many rows sender s has for owner d, and where among its rows they begin."""
    sizes = jnp.sum(table.reshape(table.shape[0], table.shape[0], -1), axis=-1)
    return sizes, jnp.cumsum(sizes, axis=1) - sizes


def _send_dense(static: _Static, rows: Array, table: Array) -> Array:
    sizes, starts = (x[jax.lax.axis_index(static.axes)] for x in _sizes(table))
    place = jnp.arange(static.room)
    at = jnp.where(place < sizes[:, None], starts[:, None] + place, static.rows)
    slots = rows.at[at].get(mode="fill", fill_value=0)
    return jax.lax.all_to_all(slots, static.axes, 0, 0, tiled=True).reshape(-1, rows.shape[1])


def _send_back_dense(static: _Static, slots: Array, table: Array) -> Array:
    P, row = table.shape[0], jnp.arange(static.rows)
    sizes, starts = (x[jax.lax.axis_index(static.axes)] for x in _sizes(table))
    back = jax.lax.all_to_all(slots.reshape(P, static.room, -1), static.axes, 0, 0, tiled=True)
    owner = jnp.searchsorted(starts + sizes, row, side="right")  # P for rows of no expert
    return back.at[owner, row - starts[jnp.minimum(owner, P - 1)]].get(mode="fill", fill_value=0)


def _send_ragged(static: _Static, rows: Array, table: Array) -> Array:
    P, here = table.shape[0], jax.lax.axis_index(static.axes)
    sizes, starts = _sizes(table)
    slots, slot = jnp.zeros((P * static.room, rows.shape[1]), rows.dtype), jnp.full((P,), here * static.room, starts.dtype)
    return jax.lax.ragged_all_to_all(rows, slots, starts[here], sizes[here], slot, sizes[:, here], axis_name=static.axes)


def _send_back_ragged(static: _Static, slots: Array, table: Array) -> Array:
    P, here = table.shape[0], jax.lax.axis_index(static.axes)
    sizes, starts = _sizes(table)
    rows, slot = jnp.zeros((static.rows, slots.shape[1]), slots.dtype), static.room * jnp.arange(P, dtype=starts.dtype)
    return jax.lax.ragged_all_to_all(slots, rows, slot, sizes[:, here], starts[:, here], sizes[here], axis_name=static.axes)
