import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.norms import gated_rms_norm, l2_norm, layer_norm, rms_norm


@pytest.mark.parametrize(("entry", "expected"), [(1e-3, 0.088045), (1e-4, 0.066227)])
def test_R010_l2_norm_adds_eps_to_the_sum(entry, expected):
    np.testing.assert_allclose(l2_norm(jnp.full((1, 128), entry)), np.full((1, 128), expected), rtol=1e-5)


def test_R026_l2_norm_has_a_finite_gradient_at_zero():
    gradient = jax.grad(lambda x: jnp.sum(l2_norm(x)))(jnp.zeros(8))
    np.testing.assert_allclose(gradient, np.full(8, 1e3), rtol=1e-6)


@pytest.mark.parametrize(("activation", "expected"), [("sigmoid", 0.5), ("silu", 0.0)])
def test_R023_gate_activations(activation, expected):
    y = gated_rms_norm(jnp.ones((1, 2)), jnp.zeros((1, 2)), jnp.ones(2), 1e-5, activation)
    np.testing.assert_allclose(y, np.full((1, 2), expected), rtol=1e-5)


def test_gated_rms_norm_normalises_before_the_gate():
    x, gate, weight = np.array([3.0, -1.0, 2.0]), np.array([0.5, -2.0, 1.0]), np.array([1.0, 2.0, -1.0])
    expected = x / np.sqrt(np.mean(x**2) + 1e-5) * weight / (1 + np.exp(-gate))
    np.testing.assert_allclose(gated_rms_norm(*(jnp.asarray(a, jnp.float32) for a in (x, gate, weight))), expected, rtol=1e-6)


def test_unknown_gate_activation_is_named():
    with pytest.raises(ValueError, match=r"activation is 'swish'.*'sigmoid', 'silu'"):
        gated_rms_norm(jnp.ones(2), jnp.ones(2), jnp.ones(2), 1e-5, "swish")


def test_R076_eps_of_each_norm_is_its_own():
    x, weight = jnp.full((1, 16), 1e-4), jnp.ones(16)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6), np.full((1, 16), 0.0995), rtol=1e-3)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), np.full((1, 16), 0.0316), rtol=1e-3)


def test_rms_norm_rounds_before_the_weight_and_gated_after():
    """The released models round at different places; both are visible in bfloat16."""
    x = jax.random.normal(jax.random.key(0), (64, 32)).astype(jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (32,)).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float32) / np.sqrt(np.mean(np.asarray(x, np.float32) ** 2, axis=-1, keepdims=True) + 1e-5)
    rounded = jnp.asarray(exact).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, weight), rounded * weight)
    gate = jnp.full_like(x, 100)  # sigmoid 1
    once = (jnp.asarray(exact) * weight.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gated_rms_norm(x, gate, weight), once)
    assert np.any(once != rounded * weight)


def test_layer_norm_is_the_textbook_formula():
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(4, 6)) + 50, rng.normal(size=6), rng.normal(size=6)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias
    y = layer_norm(*(jnp.asarray(a, jnp.float32) for a in (x, weight, bias)))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
