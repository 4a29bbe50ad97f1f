"""Attention over depth: fla's naive form, the worked example, masks, gradients, dtypes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops
from kda_jax.testing import assert_close

with np.load(Path(__file__).parents[1] / "golden" / "depth.npz") as file:
    GOLDEN = {key: jnp.asarray(file[key]) for key in file.files}


def test_equals_fla():
    """Output and the gradients of every source, query and weight: tests/golden/make.py."""
    g = GOLDEN
    f = lambda *args: ops.attention_residual(*args, eps=1e-6)
    o, pull = jax.vjp(f, g["sources"][:-1], g["sources"][-1], g["query"], g["weight"])
    assert_close("o", o, g["o"], 1e-6)
    dbank, dprefix, dquery, dweight = pull(g["do"])
    assert_close("dsources", jnp.concatenate([dbank, dprefix[None]]), g["dsources"], 2e-6)
    assert_close("dquery", dquery, g["dquery"], 2e-6)
    assert_close("dweight", dweight, g["dweight"], 2e-6)


def test_worked_example_R101():
    """A zero query is the mean, not the sum; with a query the keys are normalised and the values are not."""
    bank, prefix, one = jnp.array([[1.0, 1.0]]), jnp.array([3.0, 5.0]), jnp.ones(2)
    assert ops.attention_residual(bank, prefix, jnp.zeros(2), one).tolist() == [2, 3]
    got = ops.attention_residual(bank, prefix, jnp.array([1.0, -1.0]), one)
    np.testing.assert_allclose(got, [1.762111, 2.524221], rtol=1e-6)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unused_rows_may_hold_anything_R103(count):
    """NaN included; result and gradients are those of the rows in use, and unused rows get a gradient of zero."""
    bank, prefix, query, weight, do = draw(4, 2, 3, 8), draw(2, 3, 8, seed=1), draw(8, seed=2), draw(8, seed=3), draw(2, 3, 8, seed=4)
    spoiled = bank.at[count:].set(jnp.nan)
    run = lambda bank, count: jax.vjp(lambda *a: ops.attention_residual(*a, count=count), bank, prefix, query, weight)
    o, pull = run(spoiled, jnp.int32(count))
    expected, expected_pull = run(bank[:count], None)
    np.testing.assert_allclose(o, expected, rtol=1e-6)
    gradients, expected_gradients = pull(do), expected_pull(do)
    np.testing.assert_array_equal(gradients[0][count:], 0)
    np.testing.assert_allclose(gradients[0][:count], expected_gradients[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients[1:], expected_gradients[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_no_source_but_the_prefix_is_the_prefix():
    """To the bit: the first layer of a model reads the embedding."""
    prefix = draw(2, 3, 8).astype(jnp.bfloat16)
    got = ops.attention_residual(jnp.full((5, 2, 3, 8), jnp.nan, jnp.bfloat16), prefix, draw(8), draw(8), count=0)
    np.testing.assert_array_equal(got, prefix)


def test_16_bits():
    """One rounding: the error is that of rounding the exact result."""
    bank, prefix, query, weight = draw(4, 2, 3, 64), draw(2, 3, 64, seed=1), draw(64, seed=2), draw(64, seed=3)
    low = [x.astype(jnp.bfloat16) for x in (bank, prefix)]
    got = ops.attention_residual(*low, query, weight)
    exact = ops.attention_residual(*(x.astype(jnp.float32) for x in low), query, weight)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_backward_keeps_its_arguments_and_nothing_else_R102():
    bank, prefix = jnp.zeros((4, 2, 3, 64), jnp.bfloat16), jnp.zeros((2, 3, 64), jnp.bfloat16)
    _, pull = jax.vjp(ops.attention_residual, bank, prefix, jnp.zeros(64), jnp.zeros(64))
    kept = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "dtype") and leaf.size >= prefix.size]
    assert {leaf.dtype for leaf in kept} <= {jnp.dtype(jnp.bfloat16)}
    assert sum(leaf.size for leaf in kept) <= bank.size + prefix.size


def test_misfits_are_named():
    with pytest.raises(ValueError, match=r"bank has shape \(4, 3, 8\) and prefix \(2, 8\)"):
        ops.attention_residual(jnp.zeros((4, 3, 8)), jnp.zeros((2, 8)), jnp.zeros(8), jnp.zeros(8))
    with pytest.raises(ValueError, match=r"query has shape \(7,\); expected \(8,\)"):
        ops.attention_residual(jnp.zeros((4, 2, 8)), jnp.zeros((2, 8)), jnp.zeros(7), jnp.zeros(8))
