import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops
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


def test_bias_histogram_and_its_quantile():
    """Quantile Balancing (Kimi K3, appendices C and D) against NumPy: counts per bin, the quantile to a bin's width, parts that add up."""
    N, E, k, bins = 400, 6, 2, 50
    rng = np.random.default_rng(0)
    logits, bias = (
        rng.normal(size=(N, E)).astype(np.float32) + np.linspace(-2, 2, E, dtype=np.float32),
        rng.normal(size=E).astype(np.float32),
    )
    scores = 1 / (1 + np.exp(-logits))
    cutoff = np.sort(scores + bias, axis=-1)[:, -k - 1]
    r = cutoff[:, None] - scores
    edges = np.linspace(bias.min() - 1, bias.max() + 1, bins + 1)
    valid = np.arange(N) % 5 != 0
    found = ops.bias_histogram(jnp.asarray(logits), jnp.asarray(bias), jnp.asarray(valid), top_k=k, bins=bins)
    wanted = np.stack([np.histogram(r[valid, j], edges)[0] for j in range(E)])
    assert np.abs(np.asarray(found) - wanted).sum() <= 4  # a value on an edge may fall on either side
    assert np.all(np.asarray(found).sum(-1) == valid.sum())
    halves = [
        ops.bias_histogram(*map(jnp.asarray, (logits[part], bias, valid[part])), top_k=k, bins=bins) for part in (slice(200), slice(200, N))
    ]
    np.testing.assert_array_equal(halves[0] + halves[1], found)

    new = np.asarray(ops.quantile_bias(found, jnp.asarray(bias), k))
    exact = np.quantile(r[valid], k / E, axis=0)
    width = edges[1] - edges[0]
    assert np.abs(new - (exact - exact.mean())).max() < width
    chosen = np.argsort(-(scores + new), axis=-1)[valid, :k]
    before = np.argsort(-(scores + bias), axis=-1)[valid, :k]
    spread = lambda chosen: np.ptp(np.bincount(chosen.ravel(), minlength=E))
    assert spread(chosen) < 0.25 * spread(before)


def test_quantile_bias_without_tokens_and_without_a_choice():
    bias = jnp.array([0.5, -0.25])
    np.testing.assert_array_equal(ops.quantile_bias(jnp.zeros((2, 10), jnp.int32), bias, 1), bias)
    with pytest.raises(ValueError, match="top_k is 2 of 2 experts"):
        ops.bias_histogram(jnp.zeros((3, 2)), bias, top_k=2)
