"""Packed rows equal their documents alone; padding changes nothing (cases R033 R035 R036 R039 R041 R062 R068 R200)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.ops.spec import Inputs
from kda_jax.testing import TOLERANCE, make_problem

CASES = [pytest.param(spec, decay, id=f"{name}-{decay}") for name, spec in ops.REGISTRY.items() for decay in spec.decays]


def test_reading_of_segment_ids():
    where = ops.segments(jnp.array([[1, 1, 2, 2, 0, 0], [0, 0, 3, -1, 3, 4], [-1, -1, 5, 5, 0, 5]]))
    as_ints = lambda x: np.asarray(x).astype(int).tolist()
    assert as_ints(where.valid) == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 1]]
    assert as_ints(where.reset) == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]]
    assert as_ints(where.index) == [[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 3, 4], [0, 0, 0, 1, 2, 2]]
    assert as_ints(where.start) == [[-1, -1, 2, 2, 2, 2], [-1, -1, 2, 2, 2, 4], [-1, -1, -1, -1, -1, -1]]


ROWS = [pytest.param(*case.values, name, id=f"{case.id}-{name}") for case in CASES for name in ("scan", "xla")]
ROWS += [pytest.param(*case.values, "pallas_tpu", id=f"{case.id}-pallas_tpu", marks=pytest.mark.slow) for case in CASES]
ROWS.append(pytest.param(ops.REGISTRY["kda"], "channel", "pallas_gpu", id="kda-channel-pallas_gpu"))


@pytest.mark.parametrize(("spec", "decay", "implementation"), ROWS)
def test_packed_row_against_the_oracle(spec, decay, implementation):
    """Documents of 40, 1, 15, 0 and 9 tokens, padding inside, before and behind; all gradients; the state of the last document."""
    ids = [-1] * 2 + [3] * 40 + [4] + [5] * 7 + [-1] * 3 + [5] * 8 + [7] * 9 + [0] * 6
    packed = jnp.array([ids, [1] * 30 + [2] * 46])
    problem = make_problem(spec, jax.random.key(0), T=len(ids), segment_ids=packed, decay=decay)
    with testing.runnable(implementation):
        errors = testing.errors(spec, problem, implementation=implementation)
    for name, error in errors.items():
        limit = TOLERANCE["float32"].output if name in ("o", "final_state") else TOLERANCE["float32"].gradient
        assert error.rms <= limit, f"{name}: {error}"


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_a_document_on_the_chunk_grid_is_the_same_to_the_bit(spec, decay):
    """Outputs and state; gradients to rounding."""
    problem = make_problem(spec, jax.random.key(1), T=192, decay=decay)
    ids = jnp.repeat(jnp.array([[1, 2, 2], [5, 6, 6]]), 64, axis=1)

    def run(inputs, do, dstate, segment_ids):
        out, pull = jax.vjp(lambda x: getattr(ops, spec.name)(*spec.arrays(x), segment_ids=segment_ids), inputs)
        return out, pull(ops.RecurrenceOutput(do, dstate))[0]

    alone_ids = None if decay != "none" else jnp.ones((2, 128), jnp.int32)  # with ids an op without decay gets one, and other rounding
    packed, gradients = jax.jit(run)(problem.inputs, problem.do, problem.dstate, ids)
    cut = Inputs(*(None if x is None else x[:, 64:] for x in problem.inputs))
    alone, gradients_alone = jax.jit(run)(cut, problem.do[:, 64:], problem.dstate, alone_ids)
    assert bool(jnp.all(packed.o[:, 64:] == alone.o))
    assert bool(jnp.all(packed.final_state == alone.final_state))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_alone), strict=True):
        testing.assert_close("gradient", a[:, 64:], b, TOLERANCE["float32"].gradient)


def test_a_thousand_documents_in_one_row():
    spec = ops.REGISTRY["kda"]
    lengths = np.random.default_rng(0).integers(1, 4, 1000)
    ids = jnp.array(np.repeat(np.arange(1, 1001), lengths))[None]
    problem = make_problem(spec, jax.random.key(2), B=1, H=1, HV=1, K=4, V=4, T=ids.shape[1], segment_ids=ids)
    assert testing.errors(spec, problem, implementation="xla")["o"].rms <= TOLERANCE["float32"].output


def test_other_documents_and_padding_do_not_exist():
    """R036 R041: a document's outputs and gradients do not change by a bit with what stands in other documents or in padding."""
    spec = ops.REGISTRY["kda"]
    ids = jnp.array([[1] * 20 + [2] * 30 + [0] * 20])
    inputs = spec.make_inputs(jax.random.key(3), B=1, T=70)
    other = spec.make_inputs(jax.random.key(4), B=1, T=70)
    mine = (ids == 2)[..., None]
    mixed = Inputs(*(jnp.where(mine.reshape(1, 70, *(1,) * (x.ndim - 2)), x, y) for x, y in zip(inputs, other, strict=True)))
    poisoned = Inputs(*(jnp.where((ids == 0).reshape(1, 70, *(1,) * (x.ndim - 2)), jnp.nan, x) for x in mixed))

    @jax.jit
    def loss(inputs):
        out = ops.kda(*inputs, segment_ids=ids)
        return jnp.sum(jnp.where(mine[..., None], out.o, 0) ** 2) + jnp.sum(out.final_state**2), out

    (_, a), da = jax.value_and_grad(loss, has_aux=True)(inputs)
    (_, b), db = jax.value_and_grad(loss, has_aux=True)(poisoned)
    assert bool(jnp.all(a.final_state == b.final_state))
    assert bool(jnp.all(a.o[:, 20:50] == b.o[:, 20:50]))
    assert bool(jnp.all(b.o[:, 50:] == 0))
    for x, y in zip(da, db, strict=True):
        assert bool(jnp.all(x[:, 20:50] == y[:, 20:50]))
        assert bool(jnp.all(y[:, 50:] == 0))


def test_rows_and_one_joined_row_agree():
    """R035: four rows and their join give one result and one gradient."""
    problem = make_problem(ops.REGISTRY["kda"], jax.random.key(5), B=4, T=32)

    def outputs_and_gradients(inputs, do, segment_ids=None):
        o, pull = jax.vjp(lambda inputs: ops.kda(*inputs, segment_ids=segment_ids).o, inputs)
        return Inputs(*pull(do)[0]), o

    join = lambda x: x.reshape(1, 128, *x.shape[2:])
    rows = jax.jit(outputs_and_gradients)(problem.inputs, problem.do)
    ids = jnp.repeat(jnp.arange(1, 5), 32)[None]
    joined = jax.jit(outputs_and_gradients)(Inputs(*map(join, problem.inputs)), join(problem.do), ids)
    for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(rows), strict=True):
        testing.assert_close("joined", a.reshape(b.shape), b, 1e-6)


@pytest.mark.parametrize("name", ops.REGISTRY)
def test_any_split_is_the_whole(name):
    """R048: the state carried over any cut gives the uncut outputs and state, with a segment edge on the cut as well."""
    spec = ops.REGISTRY[name]
    inputs = spec.make_inputs(jax.random.key(6), T=100)
    call = jax.jit(lambda inputs, state, ids: getattr(ops, name)(*spec.arrays(inputs), initial_state=state, segment_ids=ids))
    whole = getattr(ops, name)(*spec.arrays(inputs))
    for cut in (1, 17, 64, 99):
        first = getattr(ops, name)(*spec.arrays(Inputs(*(x if x is None else x[:, :cut] for x in inputs))))
        second = getattr(ops, name)(
            *spec.arrays(Inputs(*(x if x is None else x[:, cut:] for x in inputs))), initial_state=first.final_state
        )
        testing.assert_close("o", jnp.concatenate([first.o, second.o], 1), whole.o, 1e-6)
        testing.assert_close("final state", second.final_state, whole.final_state, 1e-6)
    assert call(inputs, whole.final_state, jnp.ones((2, 100), jnp.int32)).o.shape == whole.o.shape
