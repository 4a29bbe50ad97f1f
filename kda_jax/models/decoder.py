"""What the Llama-shaped models share: token embedding, blocks, final RMSNorm, head."""

from collections.abc import Callable, Hashable, Sequence

from flax import nnx
from jaxtyping import Array, Float

from kda_jax.layers import RMSNorm
from kda_jax.layers.initializers import linear
from kda_jax.models.config import KimiLinearConfig, LinearLMConfig
from kda_jax.models.inputs import Inputs
from kda_jax.models.language_model import LanguageModel
from kda_jax.models.stack import Stack


def embedding(size: int, width: int, axis: str | None, *, initializer_range: float, rngs: nnx.Rngs) -> nnx.Embed:
    """Table [size, width] ~ N(0, initializer_range^2), used in the dtype of its parameter. An index out of range reads NaN.

    Args:
        axis: logical name of the first axis.
    """
    init = nnx.initializers.normal(initializer_range)
    table = nnx.Embed(size, width, embedding_init=init, embedding_metadata={"axes": (axis, "embed")}, rngs=rngs)
    table.dtype = None  # nnx.Embed would go on computing in the dtype it was made with, whatever its parameters are cast to
    return table


class Decoder(LanguageModel):
    """Embedding, blocks, RMSNorm, head; the head is the embedding's transpose where `tie_word_embeddings`."""

    def __init__(
        self,
        config: LinearLMConfig | KimiLinearConfig,
        kinds: Sequence[Hashable],
        make_block: Callable[[Hashable, nnx.Rngs], nnx.Module],
        rngs: nnx.Rngs,
        stack: Callable[..., Stack] = Stack,
    ):
        self.config = config
        D, Z, spread = config.hidden_size, config.vocab_size, config.initializer_range
        self.embed_tokens = embedding(Z, D, "vocab", initializer_range=spread, rngs=rngs)
        self.layers = stack(kinds, make_block, remat=config.remat, rngs=rngs)
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, axis="embed")
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else linear(D, Z, ("embed", "vocab"), initializer_range=spread, rngs=rngs)

    @property
    def stack(self) -> Stack:
        return self.layers

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        return self.embed_tokens(inputs.tokens)

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Z"]:
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
