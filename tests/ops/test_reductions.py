"""The lattice of the family: each recurrence is the next one with something switched off."""

import jax
import jax.numpy as jnp
import pytest

from kda_jax import ops
from kda_jax.testing import assert_close


@pytest.fixture(scope="module")
def inputs():
    return ops.REGISTRY["kda"].make_inputs(jax.random.key(0), T=100)


@pytest.mark.parametrize("implementation", ["scan", "xla"])
class TestReductions:
    def same(self, a, b):
        assert_close("o", a.o, b.o, 1e-6)
        assert_close("final state", a.final_state, b.final_state, 1e-6)

    def test_kda_with_one_decay_per_head_is_gated_deltanet(self, inputs, implementation):
        q, k, v, g, beta = inputs
        constant = jnp.broadcast_to(g[..., :1], g.shape)
        self.same(
            ops.kda(q, k, v, constant, beta, implementation=implementation),
            ops.gated_delta_rule(q, k, v, g[..., 0], beta, implementation=implementation),
        )

    def test_gated_deltanet_without_decay_is_deltanet(self, inputs, implementation):
        q, k, v, g, beta = inputs
        self.same(
            ops.gated_delta_rule(q, k, v, 0 * g[..., 0], beta, implementation=implementation),
            ops.delta_rule(q, k, v, beta, implementation=implementation),
        )

    def test_gla_with_one_decay_per_head_is_mamba2(self, inputs, implementation):
        q, k, v, g, _ = inputs
        constant = jnp.broadcast_to(g[..., :1], g.shape)
        self.same(
            ops.gated_linear_attention(q, k, v, constant, implementation=implementation),
            ops.gated_linear_attention(q, k, v, g[..., 0], implementation=implementation),
        )

    def test_gla_without_decay_is_linear_attention(self, inputs, implementation):
        q, k, v, g, _ = inputs
        self.same(
            ops.gated_linear_attention(q, k, v, 0 * g, implementation=implementation),
            ops.linear_attention(q, k, v, implementation=implementation),
        )

    def test_deltanet_on_orthonormal_keys_is_linear_attention(self, inputs, implementation):
        T = K = 16
        k = jnp.broadcast_to(jnp.linalg.qr(jax.random.normal(jax.random.key(1), (T, K)))[0][None, :, None], (2, T, 2, K))
        q, v = inputs.q[:, :T], inputs.v[:, :T]
        self.same(
            ops.delta_rule(q, k, v, jnp.ones((2, T, 4)), implementation=implementation),
            ops.linear_attention(q, k, v, implementation=implementation),
        )

    def test_kda_that_writes_nothing_only_decays(self, inputs, implementation):
        """beta = 0: the state is the initial state times the decay."""
        q, k, v, g, beta = inputs
        state = jax.random.normal(jax.random.key(2), (2, 4, 16, 8))
        out = ops.kda(q, k, v, 0.01 * g, 0 * beta, initial_state=state, implementation=implementation)
        assert_close("final state", out.final_state, jnp.exp(0.01 * g.sum(1))[..., None] * state, 1e-5)


def test_normalised_linear_attention_is_the_quadratic_form():
    """R028: o = sum_j (q.k_j) v_j / sum_j (q.k_j), gradients of k included, with and without a carried state."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = (jax.random.uniform(key, (2, 64, 2, 8)) for key in keys[:2])
    v, do = (jax.random.normal(key, (2, 64, 2, 6)) for key in keys[2:])

    def quadratic(q, k, v):
        weights = jnp.tril(jnp.einsum("bihk,bjhk->bhij", q, k, precision="highest"))
        return jnp.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdims=True), v, precision="highest")

    def in_two_calls(q, k, v, implementation):
        first = ops.linear_attention(q[:, :37], k[:, :37], v[:, :37], normalize=True, implementation=implementation)
        second = ops.linear_attention(
            q[:, 37:], k[:, 37:], v[:, 37:], normalize=True, initial_state=first.final_state, implementation=implementation
        )
        return jnp.concatenate([first.o, second.o], axis=1)

    reference, pull = jax.vjp(quadratic, q, k, v)
    for implementation in ("scan", "xla"):
        whole = lambda *a, i=implementation: ops.linear_attention(*a, normalize=True, implementation=i).o
        for f in (whole, lambda *a, i=implementation: in_two_calls(*a, i)):
            o, pull_f = jax.vjp(jax.jit(f), q, k, v)
            assert_close("o", o, reference, 1e-6)
            for name, a, b in zip("qkv", pull_f(do), pull(do), strict=True):
                assert_close(f"d{name}", a, b, 5e-6)
    assert ops.linear_attention(q, k, v, normalize=True).final_state.shape == (2, 2, 8, 7)
