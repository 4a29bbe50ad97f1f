import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.routing import expert_counts, route

LOGITS = jnp.array([[2.0, 1.0, 0.0, -1.0]])
BIAS = jnp.array([-0.5, 0.0, 0.5, 0.9])


@pytest.mark.parametrize(
    ("renormalize", "scale", "expected"),
    [(True, 2.5, [0.874389, 1.625611]), (False, 2.5, [0.672354, 1.25]), (True, 1.0, [0.349755, 0.650245])],
)
def test_R077_bias_selects_and_scale_is_a_step_of_its_own(renormalize, scale, expected):
    experts, weights = route(LOGITS, BIAS, top_k=2, renormalize=renormalize, scaling_factor=scale)
    np.testing.assert_array_equal(experts, [[3, 2]])
    np.testing.assert_allclose(weights, [expected], rtol=1e-5)


@pytest.mark.parametrize(("E", "top_k"), [(E, k) for E in (4, 8, 64, 128, 256, 384, 896) for k in (1, 2, 8, 16) if k <= E])
def test_R080_weights_are_unbiased_at_every_size(E, top_k):
    rng = np.random.default_rng(E + top_k)
    logits, bias = rng.normal(size=(3, E)).astype(np.float32), rng.normal(size=E).astype(np.float32)
    experts, weights = route(jnp.asarray(logits), jnp.asarray(bias), top_k=top_k, renormalize=False, scaling_factor=1.0)
    scores = 1 / (1 + np.exp(-logits))
    np.testing.assert_array_equal(experts, np.argsort(-(scores + bias), axis=-1)[:, :top_k])
    np.testing.assert_allclose(weights, np.take_along_axis(scores, np.asarray(experts), -1), rtol=1e-5)


def test_groups_are_scored_by_their_two_best():
    """Group 1 holds the single best expert, group 0 the best pair."""
    scores = np.array([[0.7, 0.6, 0.1, 0.9, 0.1, 0.1, 0.5, 0.5, 0.4]])
    logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
    common = {"renormalize": False, "scaling_factor": 1.0, "num_groups": 3}
    np.testing.assert_array_equal(route(logits, top_k=2, top_groups=1, **common).experts, [[0, 1]])
    np.testing.assert_array_equal(route(logits, top_k=3, top_groups=2, **common).experts, [[3, 0, 1]])
    np.testing.assert_array_equal(route(logits, top_k=3, top_groups=3, **common).experts, [[3, 0, 1]])


def test_groups_ignore_losers_when_biased_scores_are_negative():
    logits, bias = jnp.zeros((1, 4)), jnp.array([-2.0, -3.0, -4.0, -5.0])
    experts = route(logits, bias, top_k=2, renormalize=True, scaling_factor=1.0, num_groups=2, top_groups=1).experts
    np.testing.assert_array_equal(experts, [[0, 1]])


def test_softmax_scores():
    weights = route(LOGITS, top_k=2, renormalize=False, scaling_factor=1.0, activation="softmax").weights
    np.testing.assert_allclose(weights, np.asarray(jax.nn.softmax(LOGITS))[:, :2], rtol=1e-6)


def test_R084_bias_gets_no_gradient_and_logits_do():
    def loss(logits, bias):
        return jnp.sum(route(logits, bias, top_k=2, renormalize=True, scaling_factor=2.5).weights[:, 0])

    d_logits, d_bias = jax.grad(loss, argnums=(0, 1))(LOGITS, BIAS)
    np.testing.assert_array_equal(d_bias, 0)
    assert np.all(np.asarray(d_logits)[0, 2:] != 0)
    np.testing.assert_array_equal(d_logits[0, :2], 0)


def test_counts_leave_out_padding():
    experts = jnp.array([[0, 2], [2, 1], [2, 0]], jnp.int32)
    np.testing.assert_array_equal(expert_counts(experts, 4), [2, 1, 3, 0])
    np.testing.assert_array_equal(expert_counts(experts.at[1].set(-1), 4), [2, 0, 2, 0])


def test_misfits_are_named():
    with pytest.raises(ValueError, match="top_k is 5; expected 1 to 4"):
        route(LOGITS, top_k=5, renormalize=True, scaling_factor=1.0)
    with pytest.raises(ValueError, match="num_groups=3"):
        route(LOGITS, top_k=1, renormalize=True, scaling_factor=1.0, num_groups=3)
