"""A stack of layers of several kinds that compiles in the time of a few: an unrolled prologue, scanned periods, an unrolled epilogue.

XLA's work grows with the number of layer bodies it is shown. A hybrid such as KDA, KDA, KDA, MLA, KDA, ... repeats with a period,
so its parameters are stacked by period and one `jax.lax.scan` runs them all; only what does not fit the period is unrolled.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax import sharding
from kda_jax.models.cache import StackCache
from kda_jax.models.config import Remat
from kda_jax.models.placement import gathered


class Layout(NamedTuple):
    """Layer kinds in order: `prologue + period * repeats + epilogue`."""

    prologue: tuple[Hashable, ...]
    period: tuple[Hashable, ...]
    repeats: int
    epilogue: tuple[Hashable, ...]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.prologue) + len(self.period) * self.repeats + len(self.epilogue)

    @property
    def bodies(self) -> int:
        """Number of layers that the compiler sees."""
        return len(self.prologue) + len(self.period) + len(self.epilogue)

    def locate(self, layer: int) -> tuple[str, int, int | None]:
        """Where layer `layer` (from 0) lives: ("prologue" | "periods" | "epilogue", index in that list, index on the stacked axis)."""
        first, width = len(self.prologue), len(self.period)
        last = first + width * self.repeats
        if not 0 <= layer < last + len(self.epilogue):
            raise ValueError(f"layer must be in 0..{last + len(self.epilogue) - 1}, got {layer}")
        if layer < first:
            return "prologue", layer, None
        if layer < last:
            return "periods", (layer - first) % width, (layer - first) // width
        return "epilogue", layer - last, None


def plan(kinds: Sequence[Hashable]) -> Layout:
    """Split a sequence of layer kinds so that the compiler sees the fewest layers.

    Args:
        kinds: one hashable per layer; equal kinds have equal parameter shapes.

    Returns:
        the layout with the fewest bodies; among equals the one with the shortest period, then the shortest prologue.
    """
    kinds = tuple(kinds)
    L = len(kinds)
    choices = [(L, 0, 0, Layout(kinds, (), 0, ()))]
    for width in range(1, L // 2 + 1):
        for first in range(L - 2 * width + 1):
            period = kinds[first : first + width]
            repeats = 1
            while kinds[first + repeats * width : first + (repeats + 1) * width] == period:
                repeats += 1
            if repeats > 1:
                layout = Layout(kinds[:first], period, repeats, kinds[first + repeats * width :])
                choices.append((layout.bodies, width, first, layout))
    return min(choices, key=lambda choice: choice[:3])[-1]


class BlockOutput(NamedTuple):
    x: Any
    """[B, T, D], or the `layers.DepthStream` of a model with Attention Residuals."""
    cache: Any
    """The block's cache after these tokens; None if none was given."""
    counts: Int[Array, "E"] | None
    """Tokens sent to each expert; None for a block without experts."""
    max_logits: Float[Array, "H"] | None = None
    """Largest attention score of each head; None for a block without such scores, and where a cache was given."""
    histogram: Int[Array, "E bins"] | None = None
    """What Quantile Balancing needs, where the router collects it."""
    dropped: Int[Array, ""] | None = None
    """Choices that found their expert full, where experts have a capacity."""


class StackOutput(NamedTuple):
    x: Any
    cache: StackCache | None
    counts: Int[Array, "layers E"] | None
    """One row per layer with experts, in order; None when there is none."""
    max_logits: Float[Array, "layers H"] | None
    """One row per layer that reports them, in order; None when there is none."""
    histogram: Int[Array, "layers E bins"] | None
    """The same."""
    dropped: Int[Array, "layers"] | None
    """The same."""


STATISTICS = "counts", "max_logits", "histogram", "dropped"


class Stack(nnx.Module):
    """Runs blocks `(x, *, cache, segment_ids) -> BlockOutput` one after another.

    Attributes:
        layout: which layer is where.
        prologue, epilogue: one block per layer.
        periods: one block per position in the period, every parameter with a leading axis of `layout.repeats`.
    """

    def __init__(self, kinds: Sequence[Hashable], make_block: Callable[[Hashable, nnx.Rngs], nnx.Module], *, remat: Remat, rngs: nnx.Rngs):
        """
        Args:
            kinds: one per layer, see `plan`.
            make_block: (kind, rngs) -> block.
            remat: what the backward pass recomputes: "none" keeps every intermediate; "full" keeps the input of each block; "dots"
                keeps the results of the projections too.
        """
        self.layout = plan(kinds)
        self.remat = remat
        self.prologue = nnx.List([make_block(kind, rngs) for kind in self.layout.prologue])
        self.periods = nnx.List([])
        if self.layout.repeats:
            keys = jax.random.split(rngs.params(), self.layout.repeats)
            self.periods = jax.vmap(lambda key: _period(self.layout.period, make_block, key))(keys)
        self.epilogue = nnx.List([make_block(kind, rngs) for kind in self.layout.epilogue])

    def __call__(self, x: Any, *, cache: StackCache | None = None, segment_ids: Int[Array, "B T"] | None = None) -> StackOutput:
        """`x` is what the blocks take and give: [B, T, D], or a `layers.DepthStream`."""
        caches = StackCache(*[(None,) * len(part) for part in self._parts()]) if cache is None else cache

        run = functools.partial(run_blocks, self.remat, segment_ids)
        x, prologue, first = run(x, self.prologue, caches.prologue)
        periods, middle = (), {name: [] for name in STATISTICS}
        if self.layout.repeats:

            def body(x, xs):
                x, *ys = run(x, *xs, scanned=True)
                return x, ys

            x, (periods, middle) = jax.lax.scan(body, x, (self.periods, caches.periods))
        x, epilogue, last = run(x, self.epilogue, caches.epilogue)
        new_cache = None if cache is None else StackCache(prologue, periods, epilogue)
        return StackOutput(x, new_cache, *in_order(first, middle, last))

    def enter(self, x: Float[Array, "B T D"]) -> Any:
        """What the first block takes, of the embedding: for those who run the blocks of `layer` one by one."""
        return x

    def init_cache(self, batch: int, max_len: int, dtype) -> StackCache:
        """An empty cache of every block, those of the periods stacked like their parameters."""

        def init(block):
            return block.init_cache(batch, max_len, dtype)

        prologue, epilogue = (tuple(map(init, part)) for part in (self.prologue, self.epilogue))
        return StackCache(prologue, tuple(map(jax.vmap(init), self.periods)), epilogue)

    def layer(self, index: int) -> nnx.Module:
        """The block of layer `index`, counted from 0, with its own parameters (a copy of them where they are stacked)."""
        part, position, repeat = self.layout.locate(index)
        block = getattr(self, part)[position]
        return block if repeat is None else jax.tree.map(lambda p: p[repeat], block)

    def _parts(self) -> tuple[nnx.List, nnx.List, nnx.List]:
        return self.prologue, self.periods, self.epilogue


def _period(kinds: Sequence[Hashable], make_block: Callable, key: Array) -> nnx.List:
    rngs = nnx.Rngs(key)
    return nnx.List([make_block(kind, rngs) for kind in kinds])


def run_blocks(
    remat: Remat, segment_ids: Int[Array, "B T"] | None, x: Any, blocks: Sequence, caches: Sequence, *, scanned: bool = False
) -> tuple[Any, tuple, dict[str, list[Array]]]:
    """Some blocks in a row: x, their caches, and the statistics of those that have some."""
    call, after = _remat(remat, alone=scanned and len(blocks) == 1), []
    statistics = {name: [] for name in STATISTICS}
    for block, block_cache in zip(blocks, caches, strict=True):
        out = call(block, x, block_cache, segment_ids)
        x = out.x
        after.append(out.cache)
        for name, rows in statistics.items():
            rows += [] if getattr(out, name) is None else [getattr(out, name)]
    return x, tuple(after), statistics


def _call(block: nnx.Module, x: Any, cache, segment_ids) -> BlockOutput:
    if sharding.ambient() is not None:
        # Or a scheduler gathers the parameters of several blocks at once, and keeps the gradients of several before it adds them up.
        block, x = jax.lax.optimization_barrier((block, x))
    return gathered(block)(x, cache=cache, segment_ids=segment_ids)


def _remat(remat: Remat, alone: bool) -> Callable:
    """`_call` under a rematerialisation policy.

    Between blocks there is a barrier, for their recomputation must wait for its turn and not be merged with the forward. A block that is
    `alone` in the body of a scan cannot do otherwise.
    """
    if remat == "none" and sharding.ambient() is None:
        return _call
    policies = {
        "none": jax.checkpoint_policies.save_anything_except_these_names(sharding.GATHERED),
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    return jax.checkpoint(_call, policy=policies[remat], prevent_cse=not alone)


def in_order(first: dict[str, list], middle: dict[str, list], last: dict[str, list]) -> list[Array | None]:
    """Each of STATISTICS in the order of the layers, from those of `run_blocks` for prologue, periods (stacked) and epilogue."""
    return [_in_order(first[name], middle[name], last[name]) for name in STATISTICS]


def _in_order(first: list[Array], middle: list[Array], last: list[Array]) -> Array | None:
    """Rows of the prologue [E], of the periods [repeats, E] each, of the epilogue [E] -> [layers, E]."""
    parts = [jnp.stack(first)] if first else []
    if middle:
        parts.append(jnp.stack(middle, axis=1).reshape(-1, *middle[0].shape[1:]))
    parts += [jnp.stack(last)] if last else []
    return jnp.concatenate(parts) if parts else None
