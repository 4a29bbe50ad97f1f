"""TPU kernels, interpreted, where callers meet them: dtypes, NaN in padding, heads without a legal block, empty arrays, mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_logits import ordinary

from kda_jax import ops, testing

LOGITS = {
    "kda_from_logits": ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias"),
    "gated_delta_rule_from_logits": ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias"),
    "delta_rule_from_logits": ("q", "k", "v", "beta_logits"),
}


def arguments(name):
    """20 tokens; one gate logit per head where the op has one decay per head."""
    arrays, _ = ordinary()
    arrays = {n: a[:, :20] if a.ndim >= 3 else a for n, a in arrays.items()}
    if name.startswith("gated"):
        arrays |= {"x": arrays["x"][..., 0], "dt_bias": arrays["dt_bias"][:, 0]}
    return {n: arrays[n] for n in LOGITS[name]}


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("which", [("x",), ("q", "k", "v", "x", "beta_logits"), ("q", "k")], ids=str)
def test_float16_and_mixed_dtypes(which, lower_bound):
    """float16 gates are widened before the kernel, which has no such loads; q, k and v meet in the widest of their types."""
    arrays = {
        n: a.astype(jnp.float16 if "x" in which else jnp.bfloat16) if n in which else a for n, a in arguments("kda_from_logits").items()
    }
    call = lambda implementation: jax.jit(lambda a: ops.kda_from_logits(**a, lower_bound=lower_bound, implementation=implementation).o)
    with testing.runnable("pallas_tpu"):
        found = call("pallas_tpu")(arrays)
    assert found.dtype == arrays["v"].dtype
    testing.assert_close("o", found, call("xla")({n: a.astype(jnp.float32) for n, a in arrays.items()}), 1e-3 if "v" in which else 2e-3)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOGITS)
def test_nan_in_padding_reaches_no_gradient(name, implementation):
    """Neither through the norms nor through the gates: the gradients of clean padding, those of the parameters included."""
    ids = jnp.array([[1] * 7 + [-1] * 2 + [2] * 11, [1] * 15 + [0] * 5])
    padding = (ids < 1)[..., None]
    clean = arguments(name)
    poisoned = {n: jnp.where(padding.reshape(2, 20, *(1,) * (a.ndim - 2)), jnp.nan, a) if a.ndim >= 3 else a for n, a in clean.items()}
    keep = lambda o: jnp.where(padding[..., None], 0, o)
    loss = lambda a: jnp.sum(jnp.sin(keep(getattr(ops, name)(**a, segment_ids=ids, implementation=implementation).o)))
    with testing.runnable("pallas_tpu"):
        gradients = [jax.jit(jax.grad(loss))(a) for a in (poisoned, clean)]
    for n, gradient in gradients[0].items():
        assert bool(jnp.all(jnp.isfinite(gradient))), n
        np.testing.assert_array_equal(gradient, gradients[1][n])


@pytest.mark.parametrize(("name", "decay", "H", "HV"), [("linear_attention", "none", 1, 17), ("gated_linear_attention", "head", 2, 32)])
def test_grouped_heads_without_a_legal_block_are_at_the_floor(name, decay, H, HV):
    """Queries and keys are repeated before the kernel; the gradients of the copies are summed in float32."""
    spec = ops.REGISTRY[name]
    problem = testing.make_problem(spec, jax.random.key(0), B=1, T=32, H=H, HV=HV, K=16, V=16, decay=decay)
    with testing.runnable("pallas_tpu"):
        ratios = testing.floor_ratios(spec, problem, jnp.bfloat16, implementation="pallas_tpu")
    assert max(ratio for _, ratio in ratios.values()) <= testing.FLOOR_RATIO, ratios


@pytest.mark.parametrize("shape", [dict(B=0), dict(V=0)], ids=str)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_nothing_to_compute(shape, implementation, monkeypatch):
    """As on a TPU, where the kernels are refused and the others give empty arrays."""
    monkeypatch.setattr("kda_jax.sharding.platform", lambda: "tpu")
    sizes = dict(B=1, T=20, H=1, HV=2, K=4, V=3) | shape
    B, T, HV, K, V = (sizes[n] for n in ("B", "T", "HV", "K", "V"))
    q, v, x = jnp.ones((B, T, 1, K)), jnp.ones((B, T, HV, V)), jnp.ones((B, T, HV, K))
    out = ops.kda_from_logits(q, q, v, x, x[..., 0], jnp.zeros(HV), jnp.zeros((HV, K)), implementation=implementation)
    assert (out.o.shape, out.final_state.shape) == (v.shape, (B, HV, K, V))
    states = ops.chunk_states("kda", q, q, v, -x, x[..., 0], chunk_size=16, implementation=implementation)
    assert (states.o.shape, states.states.shape) == (v.shape, (B, 2, HV, K, V))


@pytest.mark.parametrize("sizes", [(0, 1), (2, 0)], ids=["no rows", "no tokens"])
def test_nothing_to_decode(sizes, monkeypatch):
    monkeypatch.setattr("kda_jax.sharding.platform", lambda: "tpu")
    B, T = sizes
    pool, x = jnp.ones((3, 1, 128, 128)), jnp.ones((B, T, 1, 128))
    after, o = ops.decode("linear_attention", pool, jnp.arange(B), x, x, x)
    assert o.shape == x.shape
    np.testing.assert_array_equal(after, pool)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(v=lambda a: a[..., 0]), r"kda: v has shape \(2, 20, 2\), expected \[B, T, HV, V\]"),
        (dict(q=lambda a: a[0]), r"kda: q has shape \(20, 1, 16\), expected \[B, T, H, K\]"),
        (dict(q=lambda a: a[:, :, :0], k=lambda a: a[:, :, :0]), "with H and K at least 1"),
        (dict(x=lambda a: a[..., :3]), r"kda: x has shape \(2, 20, 2, 3\), expected \(2, 20, 2, 16\)"),
        (dict(beta_logits=lambda a: a[..., :1]), r"kda: beta_logits has shape \(2, 20, 1\)"),
        (dict(segment_ids=lambda _: jnp.ones((2, 20))), "kda: segment_ids has dtype float32, expected integers"),
        (dict(initial_state=lambda _: jnp.ones((2, 2, 16, 8), jnp.int32)), "kda: initial_state has dtype int32, expected a float"),
        (dict(chunk_size=lambda _: 48), "kda: chunk_size is 48, expected a power of two"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_mistakes_are_the_same_sentences_everywhere(change, words, implementation):
    arrays = arguments("kda_from_logits")
    arrays |= {n: f(arrays.get(n)) for n, f in change.items()}
    with testing.runnable("pallas_tpu"), pytest.raises(ValueError, match=words):
        ops.kda_from_logits(**arrays, implementation=implementation)


@pytest.mark.parametrize(
    ("slots", "words"), [([2, 2], "name a slot twice"), ([0, 3], r"are not all in 0\.\.2"), ([-1, 0], r"are not all in 0\.\.2")]
)
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_slots_that_can_be_seen(slots, words, make):
    x = jnp.ones((2, 1, 1, 4))
    with pytest.raises(ValueError, match=words):
        ops.decode("linear_attention", jnp.zeros((3, 1, 4, 4)), make(slots), x, x, x)
    with pytest.raises(ValueError, match="kda: g is a log decay and must be <= 0"):
        ops.decode("kda", jnp.zeros((3, 1, 4, 4)), make([0, 1]), x, x, x, x, x[..., 0])
