import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixer_cases import D, assert_close, parameters, random_input, with_random_parameters

from kda_jax import layers
from kda_jax.layers import RouterBias, params

E, TOP_K, F = 8, 2, 5


@pytest.fixture(scope="module")
def moe():
    sizes = {"hidden_size": D, "intermediate_size": F, "num_experts": E, "num_experts_per_token": TOP_K}
    return with_random_parameters(lambda: layers.MoE(**sizes, num_shared_experts=2, routed_scaling_factor=2.446, rngs=nnx.Rngs(0)))


@jax.jit
def forward(moe, x, valid=None):
    return moe(x, valid=valid)


def silu(x):
    return x / (1 + np.exp(-x))


def transcription(p, x):
    """One token in float64."""
    scores = 1 / (1 + np.exp(-(x @ p["gate"]["kernel"])))
    chosen = np.argsort(-(scores + p["gate"]["e_score_correction_bias"]))[:TOP_K]
    weights = scores[chosen] / scores[chosen].sum() * 2.446
    y = 0
    for e, weight in zip(chosen, weights, strict=True):
        w1, w3, w2 = (p["experts"][name][e] for name in ("w1", "w3", "w2"))
        y = y + weight * ((silu(x @ w1) * (x @ w3)) @ w2)
    shared = p["shared_experts"]
    hidden = silu(x @ shared["gate_proj"]["kernel"]) * (x @ shared["up_proj"]["kernel"])
    return y + hidden @ shared["down_proj"]["kernel"], chosen


def test_equals_its_transcription_and_counts(moe):
    x = random_input(2, 5)
    y, counts = forward(moe, x)[:2]
    expected = [transcription(parameters(moe), token) for token in np.asarray(x, np.float64).reshape(-1, D)]
    assert_close(y.reshape(-1, D), np.stack([token for token, _ in expected]))
    np.testing.assert_array_equal(counts, np.bincount(np.concatenate([chosen for _, chosen in expected]), minlength=E))
    assert counts.dtype == jnp.int32


def test_padding_is_sent_to_no_expert_and_not_counted(moe):
    x = random_input(2, 5)
    valid = jnp.array([[False, True, True, False, True], [True, True, False, False, False]])
    y, counts = forward(moe, x, valid)[:2]
    alone = forward(moe, x).y
    np.testing.assert_array_equal(y[valid], alone[valid])
    assert counts.sum() == TOP_K * 5
    np.testing.assert_array_equal(counts, forward(moe, jnp.where(valid[..., None], x, 99.0), valid).counts)
    np.testing.assert_array_equal(forward(moe, x, jnp.zeros_like(valid)).counts, 0)


def test_tokens_do_not_influence_each_other_bit_for_bit(moe):
    x = random_input(2, 5)
    y, changed = forward(moe, x).y, forward(moe, x.at[0, 2].set(9.0)).y
    others = np.ones((2, 5), bool)
    others[0, 2] = False
    np.testing.assert_array_equal(changed[others], y[others])
    assert np.all(changed[0, 2] != y[0, 2])


def test_R091_every_parameter_learns_but_the_bias_and_the_unused_experts(moe):
    """R084: the correction bias is no parameter, so it gets no gradient; R091: experts without tokens get exactly zero."""
    x = random_input(1, 2)
    graphdef, weights, rest = nnx.split(moe, nnx.Param, ...)
    assert [type(leaf) for leaf in jax.tree.leaves(rest, is_leaf=lambda a: isinstance(a, nnx.Variable))] == [RouterBias]
    grads = jax.jit(jax.grad(lambda weights: jnp.sum(nnx.merge(graphdef, weights, rest)(x).y ** 2)))(weights)
    assert all(np.any(leaf) and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    used = np.asarray(forward(moe, x).counts) > 0
    assert 0 < used.sum() < E
    for name in ("w1", "w3", "w2"):
        np.testing.assert_array_equal(np.any(grads["experts"][name][...], axis=(1, 2)), used)


def test_R079_router_is_float32_in_a_bfloat16_model(moe):
    """Logits that differ by less than bfloat16 resolves still choose, and the bias keeps its digits."""
    graphdef, state = nnx.split(moe)
    state["gate"]["e_score_correction_bias"] = state["gate"]["e_score_correction_bias"].replace(jnp.full(E, 0.1234567))
    low = nnx.merge(graphdef, params.cast(state, jnp.bfloat16))
    np.testing.assert_array_equal(low.gate.e_score_correction_bias[...], np.full(E, 0.1234567, np.float32))
    assert low.gate.kernel.dtype == jnp.bfloat16
    x = jnp.ones((1, D), jnp.bfloat16)
    kernel = jnp.ones((D, E)).at[0, 3].add(2**-7)  # 12 + 1/128: the same number as 12 in bfloat16
    low.gate.kernel[...] = kernel.astype(jnp.bfloat16)
    routing = low.gate(x)
    assert routing.experts[0, 0] == 3
    assert routing.weights.dtype == jnp.float32
    assert forward(low, x[None]).y.dtype == jnp.bfloat16


def test_without_shared_experts():
    sizes = {"hidden_size": D, "intermediate_size": F, "num_experts": E, "num_experts_per_token": TOP_K}
    moe = with_random_parameters(lambda: layers.MoE(**sizes, num_shared_experts=0, rngs=nnx.Rngs(0)))
    assert "shared_experts" not in nnx.to_pure_dict(nnx.state(moe))
    y, counts = forward(moe, jnp.zeros((2, 5, D)))[:2]
    np.testing.assert_array_equal(y, 0)
    assert counts.sum() == 10 * TOP_K


def test_capacity_is_set_counted_and_taken_away(moe):
    """R092: what is dropped has only shared experts and the residual; the counts that balance the router do not change."""
    x = random_input(2, 5)
    whole = forward(moe, x)
    assert whole.dropped is None
    layers.limit_experts(moe, 1e-6)  # one token per expert
    limited = forward(moe, x)
    layers.limit_experts(moe, None)
    assert int(limited.dropped) == int(jnp.sum(jnp.maximum(whole.counts - 1, 0)))
    np.testing.assert_array_equal(limited.counts, whole.counts)
    assert np.any(np.asarray(limited.y != whole.y))
