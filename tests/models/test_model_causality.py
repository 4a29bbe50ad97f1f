"""The future leaves no trace: changing tokens from p on changes no bit of the logits before p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS, TOKENS, VOCAB, build, random_tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_causality_is_bitwise(name):
    """Experts included: where later tokens are sent must not move earlier ones to another rounding."""
    forward = jax.jit(lambda model, tokens: model(tokens).logits)
    model, tokens = build(name), jnp.asarray(TOKENS)
    before = np.asarray(forward(model, tokens))
    for p in (1, 17, 63, 64, 99):
        shift = 1 + random_tokens(*tokens[:, p:].shape, seed=p) % (VOCAB - 1)
        after = np.asarray(forward(model, tokens.at[:, p:].set((tokens[:, p:] + shift) % VOCAB)))
        np.testing.assert_array_equal(after[:, :p], before[:, :p])
        assert np.abs(after[:, p:] - before[:, p:]).max() > 1e-3
