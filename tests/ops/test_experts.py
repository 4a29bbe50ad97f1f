import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.experts import experts, grouped_dot, swiglu
from kda_jax.ops.routing import Routing, expert_counts, limit, route

IMPLEMENTATIONS = ["ragged", "blocks"]


def grouped_mlp(rows, sizes, weights, implementation=None):
    w1, w3, w2 = weights
    hidden = swiglu(*(grouped_dot(rows, w, sizes, implementation) for w in (w1, w3)))
    return grouped_dot(hidden, w2, sizes, implementation)


N, D, F, E, TOP_K = 70, 16, 11, 6, 2


def weights_of(E, D, F, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in [(E, D, F), (E, D, F), (E, F, D)])


def loop_over_experts(x, routing, w1, w3, w2):
    y = jnp.zeros_like(x)
    for e in range(w1.shape[0]):
        p = jnp.sum(jnp.where(routing.experts == e, routing.weights, 0), axis=-1, keepdims=True)
        y = y + p * (swiglu(x @ w1[e], x @ w3[e]) @ w2[e])
    return y


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(1)
    x, logits = (jnp.asarray(rng.normal(size=(N, n)), jnp.float32) for n in (D, E))
    return x, route(logits, top_k=TOP_K, renormalize=True, scaling_factor=2.446)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
def test_equals_a_loop_over_experts_with_gradients(case, implementation):
    x, routing = case

    def loss(f, x, combine, *weights):
        return jnp.sum(jnp.sin(f(x, Routing(routing.experts, combine), *weights)))

    def ours(*args):
        return experts(*args, implementation=implementation)

    args = x, routing.weights, *weights_of(E, D, F)
    got = jax.jit(jax.value_and_grad(lambda *a: loss(ours, *a), argnums=(0, 1, 2, 3, 4)))(*args)
    expected = jax.value_and_grad(lambda *a: loss(loop_over_experts, *a), argnums=(0, 1, 2, 3, 4))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@functools.partial(jax.jit, static_argnames="implementation")
def grouped_gradients(rows, sizes, weights, implementation):
    def loss(rows, weights):
        y = grouped_mlp(rows, sizes, weights, implementation)
        return jnp.sum(jnp.cos(y)), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(rows, weights)


@jax.jit
def masked_gradients(rows, sizes, weights):
    """The same through every expert for every row, and a mask."""
    ends = jnp.cumsum(sizes)
    number = jnp.arange(rows.shape[0])[None]
    mine = (number < ends[:, None]) & (number >= (ends - sizes)[:, None])  # [E, M]

    def loss(rows, weights):
        w1, w3, w2 = weights
        y = jnp.einsum("emf,efd->emd", swiglu(jnp.einsum("md,edf->emf", rows, w1), jnp.einsum("md,edf->emf", rows, w3)), w2)
        y = jnp.sum(jnp.where(mine[..., None], y, 0), axis=0)
        return jnp.sum(jnp.cos(y)), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(rows, weights)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 0, 0, 16], [16, 0, 0, 0], [0, 33, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]])
def test_R091_experts_without_tokens_get_exactly_zero_gradient(sizes, implementation):
    """R090, R091: also rows that belong to no group, no rows at all, and widths that are no multiple of a tile."""
    sizes, weights = jnp.array(sizes, jnp.int32), weights_of(4, 8, 5)
    rows = jax.random.normal(jax.random.key(0), (33, 8))
    got = (d_rows, d_weights), y = grouped_gradients(rows, sizes, weights, implementation)
    for a, b in zip(*map(jax.tree.leaves, (got, masked_gradients(rows, sizes, weights))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for dw in d_weights:
        np.testing.assert_array_equal(np.any(dw, axis=(1, 2)), np.asarray(sizes) > 0)
    np.testing.assert_array_equal(d_rows[sizes.sum() :], 0)
    np.testing.assert_array_equal(y[sizes.sum() :], 0)


def test_R090_a_local_share_of_the_experts_gives_its_slice():
    """A device that owns experts 4..7 of 8, given only their rows in a buffer of the full size."""
    weights = weights_of(8, D, F)
    sizes = jnp.array([5, 0, 9, 1, 0, 12, 40, 0], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (int(sizes.sum()), D))
    full = jax.jit(grouped_mlp)(rows, sizes, weights)
    mine = jnp.zeros_like(rows).at[:52].set(rows[15:])
    local = jax.jit(grouped_mlp)(mine, sizes[4:], tuple(w[4:] for w in weights))
    np.testing.assert_allclose(local[:52], full[15:], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(local[52:], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_influence_each_other(case, implementation):
    """Another token's content and choice of experts move rows about; every other output stays the same to the bit."""
    x, routing = case
    f = jax.jit(lambda x, r: experts(x, r, *weights_of(E, D, F), implementation=implementation))
    before = np.asarray(f(x, routing))
    moved = Routing(routing.experts.at[3].set((routing.experts[3] + 1) % E), routing.weights)
    after = np.asarray(f(x.at[3].set(1e3), moved))
    others = np.arange(N) != 3
    np.testing.assert_array_equal(after[others], before[others])
    assert np.all(after[3] != before[3])


def test_R088_expert_number_e_uses_weights_e():
    E, D = 6, 4
    w = jnp.arange(1.0, E + 1)[:, None, None] * jnp.eye(D)
    routing = Routing(jnp.arange(E, dtype=jnp.int32)[:, None], jnp.ones((E, 1)))
    eye, ones = jnp.broadcast_to(jnp.eye(D), (E, D, D)), jnp.ones((E, D))
    y = jax.jit(functools.partial(experts, activation=lambda gate, up: gate))(ones, routing, eye, jnp.zeros((E, D, D)), w)
    np.testing.assert_array_equal(y, np.arange(1, E + 1)[:, None] * np.ones((E, D)))


def test_R097_896_experts_forward_and_backward():
    E, D, F, top_k = 896, 32, 8, 16
    logits = jax.random.normal(jax.random.key(0), (4, E))
    x = jax.random.normal(jax.random.key(1), (4, D))
    routing = route(logits, top_k=top_k, renormalize=True, scaling_factor=1.0)
    weights = weights_of(E, D, F)

    @jax.jit
    def run(weights):
        y, pullback = jax.vjp(lambda w: experts(x, routing, *w), weights)
        return y, pullback(jnp.ones_like(y))[0]

    y, d_weights = run(weights)
    w1, w3, w2 = (np.asarray(w)[np.asarray(routing.experts)] for w in weights)  # [N, k, ...]
    h = swiglu(*(jnp.asarray(np.einsum("nd,nkdf->nkf", x, w)) for w in (w1, w3)))
    np.testing.assert_allclose(y, np.einsum("nk,nkf,nkfd->nd", routing.weights, h, w2), rtol=1e-4, atol=1e-5)
    used = np.isin(np.arange(E), routing.experts)
    for dw in d_weights:
        assert np.all(np.isfinite(dw))
        np.testing.assert_array_equal(np.any(dw, axis=(1, 2)), used)


@pytest.mark.slow
def test_faster_than_a_loop_over_64_experts():
    """Forward and backward of 2,048 tokens with 4 of 64 experts: a third of the loop's processor time at most."""
    N, D, F, E = 2048, 128, 128, 64
    routing = route(jax.random.normal(jax.random.key(0), (N, E)), top_k=4, renormalize=True, scaling_factor=1.0)
    x, weights = jax.random.normal(jax.random.key(1), (N, D)), weights_of(E, D, F)
    gradients = [jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(f(x, routing, *w) ** 2), argnums=(0, 1))) for f in (experts, loop_over_experts)]
    results, seconds = [jax.block_until_ready(f(x, weights)) for f in gradients], ([], [])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *results)
    for _ in range(5):
        for f, taken in zip(gradients, seconds, strict=True):
            start = time.process_time()
            jax.block_until_ready(f(x, weights))
            taken.append(time.process_time() - start)
    grouped, loop = map(min, seconds)
    assert loop >= 3 * grouped, (grouped, loop)


def test_bfloat16_rounds_each_product_and_sums_experts_in_float32():
    x = jax.random.normal(jax.random.key(0), (5, D)).astype(jnp.bfloat16)
    routing = route(jax.random.normal(jax.random.key(1), (5, E)), top_k=3, renormalize=True, scaling_factor=1.0)
    weights = tuple(w.astype(jnp.bfloat16) for w in weights_of(E, D, F))
    f = jax.jit(experts)
    y = f(x, routing, *weights)
    one_by_one = [f(x, Routing(routing.experts, jnp.zeros((5, 3)).at[:, j].set(1.0)), *weights) for j in range(3)]
    expected = sum(routing.weights[:, [j]] * one_by_one[j].astype(jnp.float32) for j in range(3))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sizes_of_groups_in_any_integers(implementation):
    """Two groups of 5 and 30 rows, the second in two blocks of rows; five rows belong to none."""
    x, w = jnp.arange(40.0)[:, None], jnp.array([2.0, 3.0])[:, None, None]
    wanted = np.where(np.arange(40) < 5, 2, np.where(np.arange(40) < 35, 3, 0)) * np.arange(40.0)
    for dtype in ("int32", "uint32", "int8", "uint8", "int16"):
        found = grouped_dot(x, w, jnp.array([5, 30], dtype), implementation)
        np.testing.assert_array_equal(found[:, 0], wanted, err_msg=dtype)


@pytest.mark.parametrize(("E", "dtype"), [(256, "uint8"), (128, "int8"), (4, "uint32")])
def test_numbers_of_experts_in_any_integers(E, dtype):
    """As many experts as a type has numbers: there is none left in it for a choice that has no place."""
    chosen = np.array([[E - 1], [0], [E - 1], [1]])
    w, w2 = jnp.ones((E, 1, 1)), jnp.arange(E, dtype=jnp.float32)[:, None, None]
    routing = Routing(jnp.asarray(chosen, dtype), jnp.ones((4, 1)))
    y = experts(jnp.ones((4, 1)), routing, w, w, w2, activation=lambda gate, up: up)
    np.testing.assert_array_equal(y, chosen)
    np.testing.assert_array_equal(expert_counts(routing.experts, E), np.bincount(chosen[:, 0], minlength=E))
    limited = limit(routing, E, E / 4)  # one place each
    np.testing.assert_array_equal(limited.routing.experts, [[E - 1], [0], [-1], [1]])
    assert limited.dropped == 1


def test_misfits_are_named(case):
    x, routing = case
    w1, w3, _ = weights_of(E, D, F)
    with pytest.raises(ValueError, match=r"w2 \(6, 16, 11\)"):
        experts(x, routing, w1, w3, w1)
