"""Schedules, weight decay by name, and the rule that balances experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GPT2, HYBRID

from kda_jax.config import OptimConfig
from kda_jax.train.optim import make_optimizer, make_schedule, router_bias_update, update_router_biases
from kda_jax.train.state import flatten, initial_state


def rates(steps: int, **fields) -> np.ndarray:
    schedule = make_schedule(OptimConfig(learning_rate=1.0, **fields), steps)
    return np.array([float(schedule(i)) for i in range(steps + 1)])


def test_cosine():
    found = rates(100, schedule="cosine", warmup_steps=9, final_fraction=0.1)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[9 + 91 // 2 : 9 + 91 // 2 + 2].mean(), 0.55, atol=1e-2)
    assert (np.diff(found[9:]) < 0).all()
    np.testing.assert_allclose(found[100], 0.1, rtol=1e-5)


def test_wsd():
    found = rates(100, schedule="wsd", warmup_steps=9, decay_fraction=0.2, final_fraction=0.0)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_array_equal(found[9:81], 1.0)
    np.testing.assert_allclose(found[80:101], 1 - np.arange(21) / 20, atol=1e-6)


@pytest.mark.parametrize("fields", [{"warmup_steps": 100}, {"schedule": "wsd", "warmup_steps": 50, "decay_fraction": 0.6}])
def test_schedule_must_fit(fields):
    with pytest.raises(ValueError, match=r"optim.warmup_steps .* do not fit into train.steps \(100\)"):
        rates(100, **fields)


@pytest.mark.parametrize("model", [GPT2, HYBRID], ids=["gpt2", "kimi_linear"])
def test_weight_decay_is_for_matrices(model):
    """R178 and the trap of stacked layers: a zero gradient moves exactly the parameters that decay, whatever their rank."""
    optimizer = make_optimizer(OptimConfig(weight_decay=0.5), model)
    shapes = jax.eval_shape(lambda: initial_state(model, optimizer, 0)).params
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {name for name, update in flatten(updates).items() if float(jnp.abs(update).max()) > 0}
    kept = set(flatten(updates)) - moved
    assert {name.rpartition(".")[2] for name in moved} <= {"kernel", "embedding", "w1", "w2", "w3"}
    assert {name.rpartition(".")[2] for name in kept} <= {"scale", "bias", "A_log", "dt_bias"}
    assert any("scale" in name for name in kept)
    assert any("kernel" in name for name in moved)


def test_router_bias_rule():
    """R084: towards the experts that got less; the centred form keeps the mean at 0."""
    counts = jnp.array([[6, 1, 1, 0]])
    np.testing.assert_allclose(router_bias_update(counts, 1e-3, False), [[-1e-3, 1e-3, 1e-3, 1e-3]], rtol=1e-6)
    np.testing.assert_allclose(router_bias_update(counts, 1e-3, True), [[-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]], rtol=1e-6)


def test_router_biases_follow_the_order_of_the_layers():
    """One unrolled layer, three periods of two, one more: counts of layer n reach the bias of layer n."""
    bias = lambda *shape: {"gate": {"e_score_correction_bias": jnp.zeros(shape)}}
    buffers = {"layers": {"prologue": {0: bias(4)}, "periods": {0: bias(3, 4), 2: bias(3, 4)}, "epilogue": {0: bias(4)}}}
    counts = np.ones((8, 4), np.int32)
    for layer in range(8):
        counts[layer, layer % 4] = 2 + layer
    found = update_router_biases(buffers, jnp.asarray(counts), OptimConfig(router_bias_rate=1.0))["layers"]
    layers = [found["prologue"][0]["gate"]["e_score_correction_bias"]]
    for period in range(3):
        layers += [found["periods"][i]["gate"]["e_score_correction_bias"][period] for i in (0, 2)]
    layers.append(found["epilogue"][0]["gate"]["e_score_correction_bias"])
    np.testing.assert_array_equal(np.stack(layers), np.sign(counts.mean(1, keepdims=True) - counts))
