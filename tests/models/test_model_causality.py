"""The future leaves no trace: changing tokens from p on changes no bit of the logits before p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import CONFIGS, TOKENS, VOCAB, assert_close, build, random_tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_causality_is_bitwise(name, as_users):
    """Experts included: where later tokens are sent must not move earlier ones to another rounding. Nor do tokens that are appended.

    Kimi Linear, of which all kinds of layers are part, as users compile it: at the tests' flags a CPU library splits one of its products
    otherwise for a shorter row.
    """
    forward = jax.jit(lambda model, tokens: model(tokens).logits, compiler_options=as_users if name == "kimi_linear" else None)
    model, tokens = build(name), jnp.asarray(TOKENS)
    before = np.asarray(forward(model, tokens))
    for p in (1, 17, 63, 64, 99):
        shift = 1 + random_tokens(*tokens[:, p:].shape, seed=p) % (VOCAB - 1)
        after = np.asarray(forward(model, tokens.at[:, p:].set((tokens[:, p:] + shift) % VOCAB)))
        np.testing.assert_array_equal(after[:, :p], before[:, :p])
        assert np.abs(after[:, p:] - before[:, p:]).max() > 1e-3
    np.testing.assert_array_equal(forward(model, tokens[:, :64]), before[:, :64])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_the_past_are_bitwise(name):
    """Parameters' gradients of the logits before p do not know the tokens after it: what those add is zero.

    Routed experts sum over their tokens in an order that later tokens share, so their matrices agree to rounding.
    """
    p, tokens = 65, jnp.asarray(TOKENS)
    graphdef, params, rest = nnx.split(build(name), nnx.Param, ...)
    weight = jnp.cos(jnp.arange(p * VOCAB)).reshape(p, VOCAB)

    @jax.jit
    def gradient(params, tokens):
        return jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params, rest)(tokens).logits[:, :p] * weight))(params)

    before, after = (gradient(params, t) for t in (tokens, tokens.at[:, p:].set((tokens[:, p:] + 1) % VOCAB)))
    changed = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert np.any(a) or "['prologue'][0]['self_attention_res']" in jax.tree_util.keystr(path)  # of one source there is one mix
        if not np.array_equal(a, b):
            changed.append(jax.tree_util.keystr(path))
            assert_close(a, b, rtol=1e-6)
    assert all("experts" in path for path in changed), changed
