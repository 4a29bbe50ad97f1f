"""Combinations that no grid lists, drawn by hypothesis: gates of 0 to -inf beside each other, packed rows, cuts, shapes.

The shapes of the fast tests are fixed, so that every draw runs the same compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extreme_cases import SPECS, replace
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ops, testing
from kda_jax.ops.spec import Inputs
from kda_jax.testing import TOLERANCE, make_problem

T, C = 40, 16
FEW = settings(derandomize=True, deadline=None, database=None, max_examples=25)
MORE = settings(FEW, max_examples=40)
EXTREME = TOLERANCE["float32"].extreme

gates = st.sampled_from([0.0, -1e-4, -0.5, -5.0, -40.0, -88.0, -1000.0, float("-inf")])
betas = st.sampled_from([0.0, 0.1, 1.0, 2.0])


@st.composite
def packed_rows(draw):
    """[2, T] ids: documents of any length with padding inside, before and behind, and ids that count from 0."""
    rows = []
    for _ in range(2):
        ids, i = [], draw(st.integers(0, 1))
        while len(ids) < T:
            ids += [draw(st.sampled_from([-1, i, i]))] * draw(st.sampled_from([1, 1, 2, 3, 7, 15, 16, 17]))
            i += draw(st.integers(0, 2))
        rows.append(ids[:T])
    return np.array(rows, np.int32)


def check(name, problem, chunk_size=C):
    for result, error in testing.errors(ops.REGISTRY[name], problem, implementation="xla", chunk_size=chunk_size).items():
        assert error.rms <= EXTREME, f"{name} {result}: {error}"


@pytest.mark.parametrize(("name", "decay"), [("kda", "channel"), ("gated_delta_rule", "head"), ("linear_attention", "none")])
@given(data=st.data())
@FEW
def test_gates_betas_and_packing(name, decay, data):
    """Outputs, the last document's state and all gradients equal the float64 walk along the rows."""
    spec = ops.REGISTRY[name]
    problem = make_problem(spec, jax.random.key(0), T=T, H=1, HV=2, K=4, V=3, decay=decay, segment_ids=jnp.array(data.draw(packed_rows())))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    draw = lambda values, like: jnp.array(rng.choice(data.draw(st.lists(values, min_size=1, max_size=4)), like.shape), jnp.float32)
    if problem.inputs.g is not None:
        problem = replace(problem, g=draw(gates, problem.inputs.g))
    if problem.inputs.beta is not None:
        problem = replace(problem, beta=draw(betas, problem.inputs.beta))
    check(name, problem)


@functools.cache
def whole():
    problem = make_problem(ops.REGISTRY["kda"], jax.random.key(1), B=2, T=T, H=1, HV=2, K=4, V=3)
    return problem, jax.tree.map(np.asarray, ops.kda(*problem.inputs, initial_state=problem.initial_state, chunk_size=C))


piece = jax.jit(lambda inputs, state, ids: ops.kda(*inputs, initial_state=state, segment_ids=ids, chunk_size=C))


@given(data=st.data())
@FEW
def test_any_pieces_with_any_padding_are_the_whole(data):
    """R048 R062 R069: each row is cut at places of its own; every call holds a piece per row, maybe empty, spread over T slots."""
    problem, expected = whole()
    calls = data.draw(st.integers(1, 4))
    cuts = [sorted(data.draw(st.lists(st.integers(0, T), min_size=calls - 1, max_size=calls - 1))) for _ in range(2)]
    state, o = problem.initial_state, np.zeros_like(expected.o)
    for n in range(calls):
        ids, source = np.full((2, T), -1), np.zeros((2, T), int)
        spans = [slice(*[0, *row, T][n : n + 2]) for row in cuts]
        for b, span in enumerate(spans):
            length = span.stop - span.start
            slots = np.sort(np.random.default_rng(data.draw(st.integers(0, 9))).permutation(T)[:length])
            ids[b, slots], source[b, slots] = 1, np.arange(span.start, span.stop)
        rows = np.arange(2)[:, None]
        out = piece(Inputs(*(x[rows, source] for x in problem.inputs)), state, jnp.array(ids))
        state = out.final_state
        for b, span in enumerate(spans):
            o[b, span] = np.asarray(out.o)[b, ids[b] == 1]
    testing.assert_close("o", o, expected.o, 1e-6)
    testing.assert_close("final state", state, expected.final_state, 1e-6)


@pytest.mark.slow
@given(data=st.data())
@MORE
def test_shapes(data):
    draw = lambda low, high: data.draw(st.integers(low, high))
    name, decay = data.draw(st.sampled_from(SPECS))
    H = draw(1, 3)
    sizes = dict(B=draw(1, 3), T=draw(1, 70), H=H, HV=H * draw(1, 3), K=draw(1, 33), V=draw(1, 33))
    check(name, make_problem(ops.REGISTRY[name], jax.random.key(2), decay=decay, **sizes), 2 ** draw(0, 7))
