"""The stack with Attention Residuals on toy blocks: against a list that grows, gradients against autodiff, memory against depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.layers import AttentionResidual, DepthStream
from kda_jax.models.depth_stack import DepthStack
from kda_jax.models.stack import BlockOutput
from kda_jax.testing import assert_close

D = 8


class ToyBlock(nnx.Module):
    """Two sublayers, tanh of a linear map each; the kind "e" counts something as well."""

    def __init__(self, kind, block, rngs, width=D):
        self.kind, self.block = kind, block
        self.mixes = nnx.List([AttentionResidual(width) for _ in range(2)])
        self.linears = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])

    def __call__(self, stream, *, cache=None, segment_ids=None):
        for mix, linear in zip(self.mixes, self.linears, strict=True):
            h = mix(stream)
            stream = stream.enter(self.block).add(jnp.tanh(linear(h)) * (2.0 if self.kind == "a" else 1.0))
        cache = None if cache is None else cache + stream.prefix.sum(1)
        counts = jnp.round(100 * stream.prefix[0, 0, :3]).astype(jnp.int32) if self.kind == "e" else None
        return BlockOutput(stream, cache, counts)

    def init_cache(self, batch, max_len, dtype):
        return jnp.zeros((batch, self.linears[0].in_features), dtype)


def abstract(kinds, block, remat="none", width=D):
    make = lambda kind, rngs: ToyBlock(kind, block, rngs, width)
    return nnx.eval_shape(lambda: DepthStack(kinds, make, block_sublayers=block, remat=remat, rngs=nnx.Rngs(0)))


def toy(kinds, block, remat="none"):
    """Filled on the host: nothing is compiled for it."""
    graphdef, state = nnx.split(abstract(kinds, block, remat))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), state))


def grown(stack, x, block):
    """The sources as a list: finished blocks, then the running sum."""
    bank, prefix, sublayer = [], x, 0
    for i in range(len(stack.layout.prologue) + len(stack.layout.period) * stack.layout.repeats + len(stack.layout.epilogue)):
        layer = stack.layer(i)
        for mix, linear in zip(layer.mixes, layer.linears, strict=True):
            V = jnp.stack([*bank, prefix])
            keys = V * jax.lax.rsqrt(jnp.mean(V**2, -1, keepdims=True) + 1e-5) * mix.scale[...]
            h = jnp.einsum("n...,n...d->...d", jax.nn.softmax(keys @ mix.query[...], axis=0), V)
            if sublayer % block == 0:
                bank, prefix = [*bank, prefix], 0
            prefix = prefix + jnp.tanh(linear(h)) * (2.0 if layer.kind == "a" else 1.0)
            sublayer += 1
    return bank, prefix


X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, D)), jnp.float32)
# blocks that open inside the periods, at changing places; one source per sublayer; nothing scanned; one block longer than the stack
CASES = [
    ("cababd", 3),
    ("abab", 1),
    pytest.param("abcd", 4, marks=pytest.mark.slow),
    pytest.param("eaaa", 100, marks=pytest.mark.slow),
]


def total(bank, prefix):
    return jnp.sum(jnp.sin(prefix)) + sum(jnp.sum(jnp.cos(row) * (i + 1)) for i, row in enumerate(bank))


@functools.partial(jax.jit, static_argnums=0)
def gradients(streams, stack, x):
    """Of a function of everything that `streams(stack, x)` gives, and what it gives."""

    def f(stack, x):
        bank, prefix = streams(stack, x)
        return total(bank, prefix), (jnp.stack(list(bank)), prefix)

    return jax.grad(f, argnums=(0, 1), has_aux=True)(stack, x)


def without_cache(stack, x):
    stream = stack(x).x
    return stream.bank, stream.prefix


def with_cache(stack, x):
    stream = stack(x, cache=stack.init_cache(2, 16, jnp.float32)).x
    return stream.bank, stream.prefix


@pytest.mark.parametrize(("kinds", "block"), CASES)
def test_equals_a_list_that_grows_R103(kinds, block):
    """Streams and gradients of every parameter; without a cache (the reverse pass with one bank) and with one (autodiff of the scan)."""
    stack = toy(kinds, block)
    expected = gradients(functools.partial(grown, block=block), stack, X)
    assert len(expected[1][0]) == stack.rows
    for streams in (without_cache, with_cache):
        for a, b in zip(jax.tree.leaves(gradients(streams, stack, X)), jax.tree.leaves(expected), strict=True):
            assert_close(streams.__name__, a, b, 1e-5)


def test_remat_changes_no_gradient():
    wanted = gradients(without_cache, toy("abab", 1), X)
    for a, b in zip(jax.tree.leaves(gradients(without_cache, toy("abab", 1, "full"), X)), jax.tree.leaves(wanted), strict=True):
        assert_close("gradient", a, b, 1e-6)


def test_statistics_are_in_the_order_of_the_layers():
    stack = toy("eabeab", 4)
    assert stack.layout.repeats == 2

    @jax.jit
    def both(stack):
        stream, counts = DepthStream.start(X, stack.rows), []
        for i in range(6):
            out = stack.layer(i)(stream)
            stream, counts = out.x, counts + ([] if out.counts is None else [out.counts])
        return stack(X).counts, jnp.stack(counts)

    found, wanted = both(stack)
    assert np.abs(found - wanted).max() <= 1  # rounded from numbers that agree to 1e-6
    assert np.abs(wanted[0] - wanted[1]).max() > 1


def test_one_program_for_any_depth_R103():
    """Sixteen and sixty-four layers are as much program text."""

    def lines(layers):
        stack = abstract("ab" * (layers // 2), 8)
        return len(jax.jit(lambda s, x: s(x).x.prefix).lower(stack, jax.ShapeDtypeStruct((2, 5, D), jnp.float32)).as_text().splitlines())

    assert lines(16) == lines(64)


def test_memory_of_the_backward_pass_R102():
    """Sixteen more layers, mixing as many sources as before, keep no more than ordinary residuals do: 1.3 [B, T, D] per layer at most."""
    B, T, width = 2, 64, 128

    def temp(layers):
        stack = abstract("ab" * (layers // 2), layers // 2, "full", width)
        assert stack.rows == 4
        f = jax.grad(lambda s, x: jnp.sum(s(x).x.prefix ** 2))
        lowered = jax.jit(f).lower(stack, jax.ShapeDtypeStruct((B, T, width), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(32) - temp(16) <= 1.3 * 16 * (B * T * width * 4)
