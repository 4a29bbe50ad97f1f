"""The stack of a model with Attention Residuals, with a backward pass that keeps the bank of sources once instead of once per layer."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers.attention_residual import DepthStream, source_rows
from kda_jax.models.cache import StackCache
from kda_jax.models.config import Remat
from kda_jax.models.stack import STATISTICS, Stack, StackOutput, in_order, run_blocks


class DepthStack(Stack):
    """A `Stack` whose blocks pass on a `layers.DepthStream`, which it begins with the embedding and returns as its `x`.

    The rows of the bank are written once, so the bank at the end holds every bank on the way: a layer's is its first `count` rows, and
    the others get weight zero. The backward pass goes through the layers in reverse with the last bank and each layer's prefix, which is
    [B, T, D] per layer outside the periods and per period inside, as with ordinary residuals. Autodiff of the scan would keep
    [N, B, T, D] per period. So a period is always recomputed in the backward pass; `remat` says what is kept while it is.
    """

    def __init__(
        self,
        kinds: Sequence[Hashable],
        make_block: Callable[[Hashable, nnx.Rngs], nnx.Module],
        *,
        block_sublayers: int,
        remat: Remat,
        rngs: nnx.Rngs,
    ):
        """
        Args:
            kinds, make_block, remat: as in `Stack`. Every block has two sublayers.
            block_sublayers: sublayers per block of the residual; 1 is full Attention Residuals.
        """
        super().__init__(kinds, make_block, remat=remat, rngs=rngs)
        self.rows = source_rows(2 * len(kinds), block_sublayers)

    def __call__(
        self, x: Float[Array, "B T D"], *, cache: StackCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> StackOutput:
        stream = self.enter(x)
        if cache is not None:
            return super().__call__(stream, cache=cache, segment_ids=segment_ids)
        stream, statistics = _run(self.remat, self._parts(), stream, segment_ids)
        return StackOutput(stream, None, *in_order(*statistics))

    def enter(self, x: Float[Array, "B T D"]) -> DepthStream:
        return DepthStream.start(x, self.rows)


def _step(remat: Remat, segment_ids: Any, stream: DepthStream, blocks: Sequence[nnx.Module]):
    """Some blocks in a row: the stream, and (their statistics, the stream before them without its bank)."""
    after, _, statistics = run_blocks(remat, segment_ids, stream, blocks, (None,) * len(blocks))
    return after, (statistics, stream._replace(bank=None))


def _forward(remat: Remat, parts: tuple[nnx.List, nnx.List, nnx.List], stream: DepthStream, segment_ids: Any):
    """((stream, statistics of the three parts), (streams before each unit of the three parts)). The periods are one unit, scanned."""
    prologue, periods, epilogue = parts
    step = functools.partial(_step, remat, segment_ids)

    def unrolled(stream: DepthStream, blocks: nnx.List):
        before, statistics = [], {name: [] for name in STATISTICS}
        for block in blocks:
            stream, (own, bare) = step(stream, [block])
            before.append(bare)
            statistics = {name: statistics[name] + own[name] for name in STATISTICS}
        return stream, statistics, before

    stream, first, before_first = unrolled(stream, prologue)
    middle, before_middle = {name: [] for name in STATISTICS}, None
    if len(periods):
        stream, (middle, before_middle) = jax.lax.scan(step, stream, periods)
    stream, last, before_last = unrolled(stream, epilogue)
    return (stream, (first, middle, last)), (before_first, before_middle, before_last)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(remat: Remat, parts: tuple[nnx.List, nnx.List, nnx.List], stream: DepthStream, segment_ids: Any):
    return _forward(remat, parts, stream, segment_ids)[0]


def _run_forward(remat: Remat, parts: tuple[nnx.List, nnx.List, nnx.List], stream: DepthStream, segment_ids: Any):
    out, before = _forward(remat, parts, stream, segment_ids)
    return out, (parts, segment_ids, out[0].bank, before)


def _run_backward(remat: Remat, residuals: tuple, cotangents: tuple):
    (prologue, periods, epilogue), segment_ids, bank, (before_first, before_middle, before_last) = residuals
    d = cotangents[0].prefix, cotangents[0].bank  # statistics have no gradient

    def pull(d: tuple[Array, Array], before: DepthStream, blocks: Any):
        """(gradients of prefix and bank before the blocks, of the blocks) from those after them."""

        def run(prefix: Array, bank: Array, blocks: Any):
            after, _ = _step(remat, segment_ids, before._replace(prefix=prefix, bank=bank), blocks)
            return after.prefix, after.bank

        dprefix, dbank, dblocks = jax.vjp(run, before.prefix, bank, blocks)[1](d)
        return (dprefix, dbank), dblocks

    def unrolled(d: tuple[Array, Array], blocks: nnx.List, before: list[DepthStream]):
        gradients = []
        for block, stream in zip(reversed(list(blocks)), reversed(before), strict=True):
            d, (gradient,) = pull(d, stream, [block])
            gradients.insert(0, gradient)
        return d, nnx.List(gradients)

    d, depilogue = unrolled(d, epilogue, before_last)
    dperiods = periods
    if len(periods):
        d, dperiods = jax.lax.scan(lambda d, x: pull(d, *x), d, (before_middle, periods), reverse=True)
    d, dprologue = unrolled(d, prologue, before_first)
    return (dprologue, dperiods, depilogue), DepthStream(*d, None, None), None


_run.defvjp(_run_forward, _run_backward)
