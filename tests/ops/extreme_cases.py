"""Gates, keys, betas and states at the edge of the contract, as changes to an ordinary problem of any recurrence."""

import jax
import jax.numpy as jnp

from kda_jax import ops
from kda_jax.ops.spec import Inputs
from kda_jax.testing import Problem, make_problem

NEG_INF = float("-inf")
SPECS = [(name, decay) for name, spec in ops.REGISTRY.items() for decay in spec.decays]
GATED = [(name, decay) for name, decay in SPECS if decay != "none"]
DELTA = [(name, decay) for name, decay in SPECS if ops.REGISTRY[name].delta]


def problem_of(name: str, decay: str, *, seed: int = 0, T: int = 66, H: int = 1, HV: int = 2, **sizes) -> Problem:
    """One row, two chunks, grouped value heads, K != V: one shape, so that all cases of an op share a compilation."""
    return make_problem(ops.REGISTRY[name], jax.random.key(seed), B=1, T=T, H=H, HV=HV, decay=decay, **sizes)


def replace(problem: Problem, **inputs) -> Problem:
    return problem._replace(inputs=problem.inputs._replace(**inputs))


def ordinary(shape):
    return -jax.random.uniform(jax.random.key(9), shape)


def _at(tokens, value, g):
    return g.at[:, jnp.array(tokens)].set(value)


def _where(probability, shape, value, g, seed=8):
    return jnp.where(jax.random.bernoulli(jax.random.key(seed), probability, shape), value, g)


def _tokens(shape):
    """The shape that draws once per token."""
    return shape[:2] + (1,) * (len(shape) - 2)


def _number(shape):
    """Of each token in its row."""
    return jnp.arange(shape[1]).reshape(1, -1, *(1,) * (len(shape) - 2))


GATES = {  # shape [B, T, HV] or [B, T, HV, K] -> g
    "zero": jnp.zeros,
    "two strong tokens (R001)": lambda s: _at([10, 40], -300.0, jnp.zeros(s)),
    "at the bound (R002)": lambda s: jnp.full(s, -5.0),
    "at the bound on every second channel (R002)": lambda s: jnp.where(jnp.arange(s[-1]) % 2 == 0, -5.0, jnp.zeros(s)),
    "block starts (R004)": lambda s: _at([0, 16], -200.0, jnp.zeros(s)),
    "far below any bound (R008 R025)": lambda s: jnp.full(s, -50.0),
    "-30 everywhere (R025)": lambda s: jnp.full(s, -30.0),
    "-1000 at chunk edges": lambda s: _at([0, 63, 64, 65], -1000.0, ordinary(s)),
    "-inf at chunk edges": lambda s: _at([0, 63, 64, 65], NEG_INF, ordinary(s)),
    "-inf everywhere": lambda s: jnp.full(s, NEG_INF),
    "-1000 on some channels": lambda s: jnp.where(jnp.arange(s[-1]) % 3 == 1, -1000.0, ordinary(s)),
    "-inf on some channels": lambda s: jnp.where(jnp.arange(s[-1]) % 3 == 1, NEG_INF, ordinary(s)),
    "-1000 at some tokens": lambda s: _where(0.2, _tokens(s), -1000.0, ordinary(s)),
    "-inf at some tokens": lambda s: _where(0.2, _tokens(s), NEG_INF, ordinary(s)),
    "one channel never decays": lambda s: jnp.where(jnp.arange(s[-1]) == 1, 0.0, jnp.full(s, -30.0)),
    "0 and -1000 mixed": lambda s: _where(0.3, s, -1000.0, ordinary(s)),
    "0, -5, -1000 and -inf mixed": lambda s: _where(0.1, s, NEG_INF, _where(0.2, s, -1000.0, _where(0.3, s, -5.0, jnp.zeros(s), 7), 6)),
    "of every size from 1e-6 to 1e3": lambda s: -(10.0 ** jax.random.uniform(jax.random.key(5), s, minval=-6, maxval=3)),
    "where exp is subnormal": lambda s: jnp.full(s, -88.0),
    "nothing survives a token, then nothing is lost": lambda s: jnp.where(_number(s) < 33, -200.0, jnp.zeros(s)),
}


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _identical(k):
    return jnp.broadcast_to(k[:, :1], k.shape)


def _near(spread):
    """Unit keys of cosine about 1 / sqrt(1 + spread^2) to a common one."""
    return lambda k: _unit(_identical(k) + spread * k)


KEYS = {  # (keys of norm one -> keys, beta)
    "identical keys, beta 0.5": (_identical, 0.5),
    "identical keys, beta 0.99": (_identical, 0.99),
    "identical keys, beta 1": (_identical, 1.0),
    "identical keys, beta 2": (_identical, 2.0),
    "cosine 0.7, beta 0.9": (_near(1.0), 0.9),
    "cosine 0.99, beta 1": (_near(0.14), 1.0),
    "cosine 0.9999, beta 1": (_near(0.014), 1.0),
    "two keys by turns, beta 1": (lambda k: jnp.where((jnp.arange(k.shape[1]) % 2 == 0)[:, None, None], k[:, :1], k[:, 1:2]), 1.0),
    "beta 0": (lambda k: k, 0.0),
    "beta 1": (lambda k: k, 1.0),
    "beta 2": (lambda k: k, 2.0),
    "keys of norm 4, small beta (R009)": (lambda k: 4 * k, 0.1),
    "zero keys": (jnp.zeros_like, 0.5),
    "zero keys at some tokens": (lambda k: k.at[:, 5:30].set(0), 0.5),
    "tiny keys": (lambda k: 1e-20 * k, 1.0),
}


def _on_inputs(**changes):
    return lambda p: replace(p, **{name: change(getattr(p.inputs, name)) for name, change in changes.items()})


OTHERS = {  # problem -> problem
    "zero values": _on_inputs(v=jnp.zeros_like),
    "zero values at some tokens": _on_inputs(v=lambda v: v.at[:, 7:40].set(0)),
    "zero queries": _on_inputs(q=jnp.zeros_like),
    "queries and values of 1e4": _on_inputs(q=lambda q: 1e4 * q, v=lambda v: 1e4 * v),
    "a state of 1e4": lambda p: p._replace(initial_state=1e4 * p.initial_state),
    "a state of 1e12": lambda p: p._replace(initial_state=1e12 * p.initial_state),
    "a state of zeros": lambda p: p._replace(initial_state=jnp.zeros_like(p.initial_state)),
    "cotangent on the state only (R030)": lambda p: p._replace(do=jnp.zeros_like(p.do)),
    "cotangent on the output only (R030)": lambda p: p._replace(dstate=jnp.zeros_like(p.dstate)),
    "cotangent on the last output only": lambda p: p._replace(do=p.do.at[:, :-1].set(0), dstate=jnp.zeros_like(p.dstate)),
}


def with_keys(problem: Problem, case: str) -> Problem:
    change, beta = KEYS[case]
    return replace(problem, k=change(problem.inputs.k), beta=jnp.full_like(problem.inputs.beta, beta))


def with_gates(problem: Problem, case: str) -> Problem:
    return replace(problem, g=GATES[case](problem.inputs.g.shape))


def tokens_of(inputs: Inputs, which) -> Inputs:
    """The tokens `which`, a slice, of every array."""
    return Inputs(*(None if x is None else x[:, which] for x in inputs))
