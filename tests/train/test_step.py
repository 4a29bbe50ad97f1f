"""One optimizer step: the loss, accumulation, precision, donation, gradients that are not finite."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GPT2, HYBRID, copy, make_step, random_batch, relative_error, run_config, write_text

from kda_jax.errors import TrainingStopped
from kda_jax.layers.params import cast
from kda_jax.train import loop
from kda_jax.train.data import Batch
from kda_jax.train.state import flatten
from kda_jax.train.step import next_token_loss

MODELS = pytest.mark.parametrize("model", [GPT2, HYBRID], ids=["gpt2", "kimi_linear"])
NO_TEXT = Path("no text")
UNEQUAL = [33, 33, 20, 5, 33, 12, 33, 2]


def test_loss_predicts_the_next_token():
    """R179: a table that knows 1 -> 2 -> 1 has no loss on 1 2 1 2 with the shift, and a large one without it."""
    table = 50.0 * jnp.eye(3)[jnp.array([0, 2, 1])]
    tokens = jnp.array([[1, 2, 1, 2, 1]])
    nats, count = next_token_loss(table[tokens[:, :-1]], tokens, jnp.ones_like(tokens))
    assert int(count) == 4
    assert float(nats) < 1e-6
    wrong, _ = next_token_loss(table[tokens[:, 1:]], tokens, jnp.ones_like(tokens))
    assert float(wrong) > 100


def test_no_loss_across_segments_or_at_padding():
    """R179: of 6 pairs, those within 1 1 and 2 2 2 are predicted, those across an edge or at padding are not."""
    segment_ids = jnp.array([[1, 1, 2, 2, 2, -1, -1]])
    tokens = jnp.array([[3, 1, 0, 2, 3, 1, 1]])
    logits = jax.random.normal(jax.random.key(0), (1, 6, 4))
    nats, count = next_token_loss(logits, tokens, segment_ids)
    want = -jax.nn.log_softmax(logits)[0, jnp.array([0, 2, 3]), tokens[0, jnp.array([1, 3, 4])]].sum()
    assert int(count) == 3
    np.testing.assert_allclose(nats, want, rtol=1e-6)


def test_mean_is_over_tokens():
    """R176: one token with loss 4 and three with loss 1 make 1.75, not 2.5."""
    losses = [np.full((1, 1), 4.0), np.full((1, 3), 1.0)]
    total = sum(float(x.sum()) for x in losses) / sum(x.size for x in losses)
    parts = []
    for values in losses:
        # Two classes, the right one with probability exp(-loss).
        p = np.exp(-values)
        logits = jnp.asarray(np.log(np.stack([p, 1 - p], -1)), jnp.float32)
        tokens = jnp.zeros((1, values.shape[1] + 1), jnp.int32)
        parts.append(next_token_loss(logits, tokens, jnp.ones_like(tokens)))
    assert float(sum(n for n, _ in parts)) / int(sum(c for _, c in parts)) == pytest.approx(total, rel=1e-5) == pytest.approx(1.75)


@pytest.mark.parametrize(("model", "splits"), [(GPT2, (1, 2, 4)), (HYBRID, (1, 4))], ids=["gpt2", "kimi_linear"])
def test_accumulation_is_the_large_batch(model, splits):
    """R176 R082: micro-batches with different numbers of real tokens give the loss, the gradient and the expert counts of the whole."""
    batch = random_batch(8, lengths=UNEQUAL)
    results = []
    for parts in splits:
        state, step = make_step(run_config(NO_TEXT, model, batch_size=8, micro_batches=parts))
        state, metrics = step(state, batch)
        results.append((state, metrics))
    (whole, wanted), *others = results
    assert int(wanted.tokens) == sum(UNEQUAL) - 8
    for state, metrics in others:
        np.testing.assert_allclose(metrics.loss, wanted.loss, rtol=1e-6)
        np.testing.assert_allclose(metrics.grad_norm, wanted.grad_norm, rtol=1e-5)
        assert relative_error(moments(state), moments(whole)) < 1e-5
        jax.tree.map(np.testing.assert_array_equal, state.buffers, whole.buffers)


def moments(state) -> list:
    """Adam's first moments after one step: the clipped gradient times 1 - b1."""
    return [leaf for name, leaf in flatten(state.opt_state).items() if ".mu." in name]


def test_padding_is_as_if_it_were_not_there():
    """Rows cut at 17 tokens and padded with anything: the step of the rows that end there."""
    state, step = make_step(run_config(NO_TEXT, steps=30))
    full = random_batch(4, lengths=[17] * 4)
    short = Batch(full.tokens[:, :17], full.segment_ids[:, :17])
    found, metrics = step(copy(state), full)
    wanted, other = step(state, short)
    np.testing.assert_allclose(metrics.loss, other.loss, rtol=1e-6)
    assert relative_error(moments(found), moments(wanted)) < 1e-5


@MODELS
def test_masters_and_moments_stay_float32(model):
    """R174 R178: bf16 compute; masters, moments and the named exceptions float32, before and after a step."""
    config = run_config(NO_TEXT, model, compute_dtype="bfloat16")
    state, step = make_step(config, abstract=True)
    after, _ = jax.eval_shape(step, state, random_batch(4))
    for tree in (state.params, after.params, after.opt_state, after.buffers):
        assert {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)} <= {"float32"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    jaxpr = str(jax.make_jaxpr(step)(state, random_batch(4)))
    assert "bf16[4,32,256]" in jaxpr, "the logits are not computed in bfloat16"


def test_named_exceptions_are_not_cast():
    """R178: of the parameters that the forward sees in bf16, only A_log and dt_bias are float32; so is the router's bias."""
    state, _ = make_step(run_config(NO_TEXT, HYBRID), abstract=True)
    params = jax.eval_shape(lambda p: cast(p, jnp.bfloat16), state.params)
    exceptions = {name for name, x in flatten(params).items() if x.dtype == jnp.float32}
    assert {name.rpartition(".")[2] for name in exceptions} == {"A_log", "dt_bias"}
    assert {str(x.dtype) for x in jax.tree.leaves(state.buffers)} == {"float32"}


def test_state_is_donated():
    state, step = make_step(run_config(NO_TEXT, steps=30))
    before = jax.tree.leaves((state.params, state.opt_state))
    after, _ = step(state, random_batch(4))
    assert all(x.is_deleted() for x in before if x.size > 1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


def test_learning_falls():
    state, step = make_step(run_config(NO_TEXT, steps=30))
    losses = []
    for _ in range(30):
        state, metrics = step(state, random_batch(4))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * losses[0]


def test_bad_gradient_leaves_the_step_out():
    """R180: parameters and moments keep their values, the position in the data moves on."""
    state, step = make_step(run_config(NO_TEXT, steps=30))
    poisoned = state._replace(params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), state.params))
    kept = copy(poisoned)
    after, metrics = step(poisoned, random_batch(4))
    assert bool(metrics.skipped)
    assert not bool(metrics.finite.all())
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (kept.params, kept.opt_state))
    assert int(after.step) == 1


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_bad_gradient_is_named(tmp_path, monkeypatch, capsys, on_nonfinite):
    """R180: the first parameter whose gradient is not finite is named; the run skips the step or stops, as told."""
    fresh = loop.initial_state

    def poisoned(*args):
        state = fresh(*args)
        return state._replace(params=jax.tree.map(lambda x: x * jnp.nan if x.shape == (64, 32) else x, state.params))

    monkeypatch.setattr(loop, "initial_state", poisoned)
    config = run_config(write_text(tmp_path / "text"), steps=3, on_nonfinite=on_nonfinite)
    first = next(iter(flatten(make_step(config)[0].params)))
    if on_nonfinite == "stop":
        with pytest.raises(TrainingStopped, match=rf"step 1: the gradient of {first} is not finite .*on_nonfinite"):
            loop.train(config, tmp_path / "run")
    else:
        loop.train(config, tmp_path / "run")
        assert capsys.readouterr().out.count(f"the gradient of {first} is not finite") == 3


@pytest.mark.slow
@MODELS
def test_soak(tmp_path, model):
    """R180: 500 bf16 steps at a high rate without a value that is not finite."""
    config = run_config(write_text(tmp_path / "text"), model, steps=500, compute_dtype="bfloat16", on_nonfinite="stop")
    assert loop.train(config, tmp_path / "run").evaluation.bits_per_byte < 1.5
