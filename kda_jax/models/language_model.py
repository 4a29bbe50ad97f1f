"""The forward that every model shares: tokens in, logits out, with or without a cache."""

from typing import NamedTuple, no_type_check

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kda_jax.models.cache import HybridCache, StackCache, advance
from kda_jax.models.config import ModelConfig
from kda_jax.models.inputs import Inputs, read_inputs
from kda_jax.models.placement import gathered
from kda_jax.models.stack import Stack
from kda_jax.sharding import automatic, constrain


class ModelOutput(NamedTuple):
    """logits [B, T, Z], the cache after these tokens, and what the layers report besides."""

    logits: Float[Array, "B T Z"]
    """In the compute dtype: that of the parameters. The loss is where they become float32."""
    cache: HybridCache | None
    """The cache after these tokens; None if none was given."""
    aux: dict[str, Array]
    """`expert_counts` [layers with experts, E] int32, tokens sent to each expert, where there are experts; `max_logits` [MLA layers, H],
    the largest score of each head, where there is MLA and no cache was given; `router_histogram` [layers with experts, E, bins] where
    `layers.collect_histograms` has asked for it; `dropped` [layers with experts], choices that found their expert full, where
    `layers.limit_experts` has set a capacity."""


class LanguageModel(nnx.Module):
    """A causal language model: embedding, stack of blocks, head. Subclasses define `embed`, `stack` and `head`.

    One forward serves training, prefill in any split of the prompt, and decoding:

        logits = model(tokens).logits                              # training: a whole batch
        out = model(prompt, cache=model.init_cache(B, max_len))    # prefill, in as many pieces as you like
        out = model(next_token, cache=out.cache)                   # decode: T = 1
    """

    config: ModelConfig

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        raise NotImplementedError

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Z"]:
        raise NotImplementedError

    @property
    def stack(self) -> Stack:
        raise NotImplementedError

    @no_type_check  # read_inputs raises ValueError with the name and shape of the argument
    def __call__(
        self, tokens: Int[Array, "B T"], *, cache: HybridCache | None = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> ModelOutput:
        """Logits of the token after each position.

        Args:
            tokens: [B, T] ids in 0..vocab_size-1; any value at padding.
            cache: from `init_cache` or an earlier call; the tokens continue each row from there.
            segment_ids: [B, T]; a new id starts a new sequence, which sees nothing before it. A negative id is padding, and so is
                0: anywhere when a cache is given, after the first positive id when not (`ops.segments`). Padding may stand on the
                left, on the right or between; it changes nothing, and the logits there mean nothing.

        Returns:
            ModelOutput(logits, cache, aux).

        Raises:
            ValueError: a shape that does not fit; where values can be seen (outside jit) also a token id out of range, or more tokens
                than the cache or the model's positions hold. Inside jit such a row gets NaN logits instead.

        Sharding: rows, time and vocabulary of the logits as the ambient mesh splits them. On an explicit mesh results are whole on every
            device; `sharding.automatic` around a function of one's own, as the train step has it, leaves them where they were made.
        """
        return automatic(type(self)._forward, PartitionSpec())(self, tokens, cache, segment_ids)

    @no_type_check  # called with whatever __call__ was given
    def _forward(self, tokens: Array, cache: HybridCache | None, segment_ids: Array | None) -> ModelOutput:
        inputs = read_inputs(tokens, cache, segment_ids, self.config.vocab_size)
        parts = None if cache is None else StackCache(cache.prologue, cache.periods, cache.epilogue)
        ends = gathered(self, but=self.stack)
        x = constrain(ends.embed(inputs), "batch", "time", "embed")
        out = self.stack(x, cache=parts, segment_ids=inputs.segment_ids)
        logits = constrain(ends.head(out.x), "batch", "time", "vocab")
        aux = {"expert_counts": out.counts, "max_logits": out.max_logits, "router_histogram": out.histogram, "dropped": out.dropped}
        aux = {name: value for name, value in aux.items() if value is not None}
        if cache is None:
            return ModelOutput(logits, None, aux)
        new_cache = advance(cache, inputs.added, inputs.start, out.cache)
        if new_cache.capacity is not None:
            overfull = new_cache.length > new_cache.capacity
            logits = jnp.where(overfull[:, None, None], jnp.nan, logits)
        return ModelOutput(logits, new_cache, aux)

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> HybridCache:
        """An empty cache.

        Args:
            batch: rows.
            max_len: tokens that each row will hold at most; only attention layers use memory for them.
            dtype: of attention entries and conv histories, normally the compute dtype; recurrent states are always float32.
        """
        if batch < 1 or max_len < 1:
            raise ValueError(f"init_cache needs batch >= 1 and max_len >= 1, got {batch} and {max_len}")
        zeros = [jnp.zeros((batch,), jnp.int32) for _ in range(2)]
        return HybridCache(*zeros, *self.stack.init_cache(batch, max_len, dtype))
