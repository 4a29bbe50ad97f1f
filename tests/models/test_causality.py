"""The future leaves no trace: perturbing tokens from p on changes no bit of the logits before p."""

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS, VOCAB, build, forward, random_tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_causality_is_bitwise(name):
    """Experts included: how later tokens are routed must not move earlier ones to another rounding."""
    model, tokens = build(name), random_tokens(2, 100)
    before = forward(model, tokens).logits
    for p in (1, 17, 63, 64, 99):
        changed = tokens.at[:, p:].set((tokens[:, p:] + 1 + random_tokens(2, 100 - p, seed=p) % (VOCAB - 1)) % VOCAB)
        after = forward(model, changed).logits
        np.testing.assert_array_equal(after[:, :p], before[:, :p])
        assert jnp.abs(after[:, p:] - before[:, p:]).max() > 1e-3
