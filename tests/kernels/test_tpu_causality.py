"""TPU kernels: nothing after a token moves what came before it, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import NO_TOKEN, chunk_kda_from_logits, chunk_recurrence, chunk_states
from tests.kernels.oracle import error, make_case, recurrence
from tests.kernels.run_tpu import arguments, forward, forward_backward, interpreted


@pytest.mark.parametrize("decay", ["none", "head", "channel", "bounded"])
def test_future_tokens_change_nothing(decay):
    """fla#1240: an anchor from later tokens leaks their gates through rounding. Position 21 is inside a strip and a chunk."""
    bound = -5.0 if decay == "bounded" else None
    a, b = make_case(decay, True, T=50), make_case(decay, True, T=50, seed=1)
    mixed = a._replace(**{n: np.concatenate([getattr(a, n)[:, :21], getattr(b, n)[:, 21:]], 1) for n in ("q", "k", "v", "beta")})
    if a.g is not None:
        mixed = mixed._replace(g=np.concatenate([a.g[:, :21], b.g[:, 21:]], 1))
    outputs = [np.asarray(forward(c, jnp.bfloat16, chunk_size=32, lower_bound=bound)[0], np.float32) for c in (a, mixed)]
    np.testing.assert_array_equal(outputs[0][:, :21], outputs[1][:, :21])
    assert np.any(outputs[0][:, 21:] != outputs[1][:, 21:])


def test_longer_input_keeps_its_prefix():
    case = make_case("channel", True, T=40)
    short = case._replace(**{n: getattr(case, n)[:, :27] for n in ("q", "k", "v", "g", "beta")})
    long_o, short_o = (np.asarray(forward(c, jnp.float32, chunk_size=16)[0]) for c in (case, short))
    np.testing.assert_array_equal(long_o[:, :27], short_o)


def test_split_with_the_state_passed_on():
    """Chunk-aligned splits are the same sums in the same order; T = 32 then the rest."""
    case = make_case("head", True, T=50)
    whole = forward(case, jnp.float32, chunk_size=16)
    cut = lambda a, b: {n: getattr(case, n)[:, a:b] for n in ("q", "k", "v", "g", "beta")}
    first = forward(case._replace(**cut(0, 32)), jnp.float32, chunk_size=16)
    second = forward(case._replace(**cut(32, 50), initial_state=np.asarray(first[1])), jnp.float32, chunk_size=16)
    np.testing.assert_array_equal(np.concatenate([first[0], second[0]], 1), whole[0])
    np.testing.assert_array_equal(second[1], whole[1])


def test_no_initial_state_is_zeros():
    """R039: None equals explicit zeros bit for bit."""
    case = make_case("none", True, T=20)
    a = arguments(case._replace(initial_state=np.zeros_like(case.initial_state)), jnp.float32)
    with interpreted():
        given = jax.jit(lambda a: chunk_recurrence(**a, chunk_size=16))(a)
        del a["initial_state"]
        absent = jax.jit(lambda a: chunk_recurrence(**a, chunk_size=16))(a)
    jax.tree.map(np.testing.assert_array_equal, given, absent)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_fused_entry_is_the_separate_functions(lower_bound):
    """kda_from_logits: values and gradients of the gate's parameters, a reset and a padded token included."""
    B, T, HV, K, C = 2, 37, 2, 16, 16
    keys = iter(jax.random.split(jax.random.key(0), 10))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    a = {
        "q": normal(B, T, 1, K),
        "k": normal(B, T, 1, K),
        "v": normal(B, T, HV, K),
        "x": normal(B, T, HV, K),
        "beta_logits": normal(B, T, HV),
    }
    a |= {"A_log": normal(HV), "dt_bias": normal(HV, K)}
    cotangents = normal(B, T, HV, K), normal(B, HV, K, K)
    reset = jnp.zeros((B, T), bool).at[0, jnp.array([3, 20])].set(True)
    padding = jnp.zeros((B, T), bool).at[1, 30:].set(True)

    def fused(a):
        x = jnp.where(padding[..., None, None], NO_TOKEN, a["x"])
        beta = jnp.where(padding[..., None], NO_TOKEN, a["beta_logits"])
        return chunk_kda_from_logits(**a | {"x": x, "beta_logits": beta}, reset=reset, chunk_size=C, lower_bound=lower_bound)

    def separate(a):
        unit = lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        x, rate = a["x"] + a["dt_bias"], jnp.exp(a["A_log"])[:, None]
        g = -rate * jax.nn.softplus(x) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * x)
        g = jnp.where(reset[..., None, None], -jnp.inf, jnp.where(padding[..., None, None], 0.0, g))
        beta = jnp.where(padding[..., None], 0.0, jax.nn.sigmoid(a["beta_logits"]))
        return chunk_recurrence(unit(a["q"]), unit(a["k"]), a["v"], g, beta, chunk_size=C)

    def both(f):
        out, pull = jax.vjp(f, a)
        return {"o": out[0], "final": out[1], **pull(cotangents)[0]}

    with interpreted():
        got, want = (jax.jit(lambda f=f: both(f))() for f in (fused, separate))
    errors = {n: error(got[n], want[n]) for n in want}
    assert max(errors.values()) <= 2e-6, errors


def test_states_before_every_chunk():
    """R194: row n is the final state of the first n chunks, to the bit; the outputs are those of the call without them."""
    case = make_case("head", True, T=40, HV=2)
    a = arguments(case, jnp.float32)
    with interpreted():
        o, final, starts = jax.jit(lambda a: chunk_states(**a, chunk_size=16))(a)
        first = jax.jit(lambda a: chunk_recurrence(**a, chunk_size=16))({n: x if n == "initial_state" else x[:, :32] for n, x in a.items()})
    assert starts.shape == (1, 3, 2, 16, 16)
    np.testing.assert_array_equal(starts[:, 0], a["initial_state"])
    np.testing.assert_array_equal(starts[:, 2], first[1])
    np.testing.assert_array_equal(o[:, :32], first[0])
    want = recurrence(case.rounded(jnp.float32))
    assert max(error(o, want["o"]), error(final, want["final"])) <= 1e-6


@pytest.mark.slow
def test_any_order_of_the_parallel_axes():
    """The interpreter shuffles rows and blocks of heads: 2 rows of 24 heads, three blocks."""
    case = make_case("none", True, T=20, B=2, H=24, HV=24)
    outputs = []
    for seed in (None, 1, 2):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", random_seed=seed)):
            outputs.append(jax.jit(lambda a: chunk_recurrence(**a, chunk_size=16))(arguments(case, jnp.float32)))
    for other in outputs[1:]:
        jax.tree.map(np.testing.assert_array_equal, outputs[0], other)


@pytest.mark.slow
def test_deterministic():
    case = make_case("bounded", True, T=20)
    runs = [forward_backward(case, jnp.bfloat16, chunk_size=16, lower_bound=-5.0) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)
