"""From logits to output: every gradient of `kda_from_logits`, those of A_log and dt_bias included, by a chain rule written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.ops.spec import Inputs
from kda_jax.testing import TOLERANCE, Problem

B, T, H, HV, K, V = 2, 66, 1, 2, 16, 8
NAMES = ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias")


def ordinary():
    keys = jax.random.split(jax.random.key(0), 10)
    shapes = (B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV), (HV,), (HV, K)
    arrays = dict(zip(NAMES, (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)), strict=True))
    rest = [jax.random.normal(key, shape) for key, shape in zip(keys[7:], ((B, HV, K, V), (B, T, HV, V), (B, HV, K, V)), strict=True)]
    return arrays, rest


def sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def unit(x):
    """x / n and the pull-back of a cotangent, n = sqrt(sum x^2 + 1e-6)."""
    n = np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)
    return x / n, lambda d: (d - x / n * np.sum(d * x / n, -1, keepdims=True)) / n


def expected(arrays, rest, lower_bound):
    """Results and gradients in float64."""
    state, do, dstate = rest
    q, k, v, x, logits, A_log, dt_bias = (np.asarray(arrays[name], np.float64) for name in NAMES)
    (q, pull_q), (k, pull_k), beta = unit(q), unit(k), sigmoid(logits)
    z, rate = x + dt_bias, np.exp(A_log)[:, None]
    if lower_bound is None:
        g = -rate * (np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
        by_z, by_A = -rate * sigmoid(z), g
    else:
        s = sigmoid(rate * z)
        g, by_z = lower_bound * s, lower_bound * s * sigmoid(-rate * z) * rate
        by_A = by_z * z
    r = testing.oracle(ops.REGISTRY["kda"], Problem(Inputs(q, k, v, g, beta), state, do, dstate))
    chain = {"dq": pull_q(r["dq"]), "dk": pull_k(r["dk"]), "dx": r["dg"] * by_z, "dbeta_logits": r["dbeta"] * beta * sigmoid(-logits)}
    chain |= {"dA_log": np.sum(r["dg"] * by_A, (0, 1, 3)), "ddt_bias": np.sum(r["dg"] * by_z, (0, 1))}
    return {name: r[name] for name in ("o", "final_state", "dv", "dinitial_state")} | chain


@functools.partial(jax.jit, static_argnums=(2, 3))
def found(arrays, rest, lower_bound, implementation):
    state, do, dstate = rest

    def f(arrays, state):
        return tuple(ops.kda_from_logits(**arrays, initial_state=state, lower_bound=lower_bound, implementation=implementation))

    (o, final_state), pull = jax.vjp(f, arrays, state)
    gradients, dinitial_state = pull((do, dstate))
    return {"o": o, "final_state": final_state, "dinitial_state": dinitial_state} | {f"d{name}": x for name, x in gradients.items()}


CASES = {
    "ordinary": {},
    "gates shut and open": {"x": lambda x: jnp.where(x > 0.5, 1e4, jnp.where(x < -0.5, -1e4, x))},
    "at the bound": {"x": lambda x: jnp.full_like(x, 1e4)},
    "fast heads": {"A_log": lambda a: jnp.full_like(a, jnp.log(16.0))},
    "nothing written, then all": {"beta_logits": lambda b: jnp.where(jnp.arange(T)[:, None] < 33, -200.0, 200.0)},
    "zero queries and keys at some tokens": {"q": lambda q: q.at[:, 3:9].set(0), "k": lambda k: k.at[:, 5:20].set(0)},
    "small queries and keys": {"q": lambda q: 1e-4 * q, "k": lambda k: 1e-4 * k},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["scan", "xla"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_every_gradient(lower_bound, implementation, case):
    arrays, rest = ordinary()
    arrays = arrays | {name: change(arrays[name]) + jnp.zeros_like(arrays[name]) for name, change in CASES[case].items()}
    reference, got = expected(arrays, rest, lower_bound), found(arrays, rest, lower_bound, implementation)
    assert reference.keys() == got.keys()
    tolerance = TOLERANCE["float32"]
    for name, x in reference.items():
        limit = tolerance.extreme if case != "ordinary" else tolerance.output if name in ("o", "final_state") else tolerance.gradient
        testing.assert_close(name, got[name], x, limit)
