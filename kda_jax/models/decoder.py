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


def token_embedding(vocab_size: int, width: int, *, initializer_range: float, rngs: nnx.Rngs) -> nnx.Embed:
    """Table [vocab_size, width] ~ N(0, initializer_range^2). An id out of range reads NaN."""
    init = nnx.initializers.normal(initializer_range)
    return nnx.Embed(vocab_size, width, embedding_init=init, embedding_metadata={"axes": ("vocab", "embed")}, rngs=rngs)


class Decoder(LanguageModel):
    """Embedding, blocks, RMSNorm, head; the head is the embedding's transpose where `tie_word_embeddings`."""

    def __init__(
        self,
        config: LinearLMConfig | KimiLinearConfig,
        kinds: Sequence[Hashable],
        make_block: Callable[[Hashable, nnx.Rngs], nnx.Module],
        rngs: nnx.Rngs,
    ):
        self.config = config
        D, Z, spread = config.hidden_size, config.vocab_size, config.initializer_range
        self.embed_tokens = token_embedding(Z, D, initializer_range=spread, rngs=rngs)
        self.layers = Stack(kinds, make_block, remat=config.remat, rngs=rngs)
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
