"""The stack: how a sequence of kinds is split, and that scanning it changes nothing but the size of the program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kda_jax.models.stack import BlockOutput, Layout, Stack, plan


class ToyBlock(nnx.Module):
    """x + tanh(x W) + running sum; the kind "e" also counts something, as a block with experts does."""

    def __init__(self, kind, width, rngs):
        self.kind = kind
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, *, cache=None, segment_ids=None):
        y = x + 0.1 * jnp.tanh(self.linear(x)) * (2.0 if self.kind == "a" else 1.0)
        if cache is not None:
            cache = cache + x.sum(1)
            y = y + 0.01 * cache[:, None]
        counts = jnp.round(100 * y[0, 0, :3]).astype(jnp.int32) if self.kind == "e" else None
        return BlockOutput(y, cache, counts)

    def init_cache(self, batch, max_len, dtype):
        return jnp.zeros((batch, self.linear.in_features), dtype)


def toy(kinds, remat="none", width=8):
    return Stack(kinds, lambda kind, rngs: ToyBlock(kind, width, rngs), remat=remat, rngs=nnx.Rngs(0))


def test_plan_of_the_48b_schedule():
    """Dense KDA, then (KDA, KDA, MLA, KDA) x 6, then KDA, MLA: 7 bodies for 27 layers."""
    kinds = ["k0"] + ["m" if i in (4, 8, 12, 16, 20, 24, 27) else "k" for i in range(2, 28)]
    layout = plan(kinds)
    assert layout == Layout(("k0",), ("k", "k", "m", "k"), 6, ("k", "m"))
    assert layout.bodies == 7


@pytest.mark.parametrize(
    ("kinds", "bodies"),
    [("a", 1), ("ab", 2), ("aaaaaaaaaaaa", 1), ("kkkm", 2), ("abcabcabc", 3), ("xabababy", 4), ("abcdefg", 7), ("k" * 5 + "m" * 5, 6)],
)
def test_plan_finds_the_fewest_bodies_and_keeps_the_order(kinds, bodies):
    layout = plan(kinds)
    assert layout.prologue + layout.period * layout.repeats + layout.epilogue == tuple(kinds)
    assert layout.bodies == bodies
    parts = {"prologue": layout.prologue, "periods": layout.period, "epilogue": layout.epilogue}
    assert "".join(parts[part][position] for part, position, _ in map(layout.locate, range(len(kinds)))) == kinds


def test_locate_refuses_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match=r"0\.\.3"):
        plan("kkkm").locate(4)


@pytest.mark.parametrize("kinds", ["a", "aaaa", "eabababe", "beaeaea"])
@pytest.mark.parametrize("cached", [False, True])
def test_scan_equals_a_loop_over_the_same_layers_R160(kinds, cached):
    stack = toy(kinds)
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    cache = stack.init_cache(2, 16, jnp.float32) if cached else None
    out = stack(x, cache=cache)
    y, counts, states = x, [], []
    for i, kind in enumerate(kinds):
        block = stack.layer(i)
        assert block.kind == kind
        step = block(y, cache=block.init_cache(2, 16, jnp.float32) if cached else None)
        y = step.x
        states.append(step.cache)
        counts += [] if step.counts is None else [step.counts]
    assert jnp.abs(out.x - y).max() < 1e-6
    assert (out.counts is None) == (not counts)
    if counts:
        assert jnp.abs(out.counts - jnp.stack(counts)).max() <= 1  # rounded from numbers that agree to 1e-6
    if cached:
        for i, state in enumerate(states):
            part, position, repeat = stack.layout.locate(i)
            found = getattr(out.cache, part)[position]
            assert jnp.abs((found if repeat is None else found[repeat]) - state).max() < 1e-6
    else:
        assert out.cache is None


def test_layers_of_a_period_start_different():
    kernel = toy("aaaa").periods[0].linear.kernel[...]
    assert kernel.shape == (4, 8, 8)
    assert len({float(kernel[i, 0, 0]) for i in range(4)}) == 4


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_neither_loss_nor_gradients(remat):
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    run = lambda stack: jax.value_and_grad(lambda s: (s(x).x ** 2).mean())(stack)
    (loss, grads), (expected, expected_grads) = run(toy("babababc", remat)), run(toy("babababc"))
    assert jnp.allclose(loss, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)
