"""The one error metric, the one tolerance table, and the float64 oracle every implementation is held to."""

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import ops
from kda_jax.ops.spec import Inputs, OpSpec


class Error(NamedTuple):
    """Distance of an array from its reference."""

    rms: float
    """RMS(error) / RMS(reference): the number that tolerances are about."""
    largest: float
    """max |error| / max |reference|."""

    def __str__(self) -> str:
        return f"rms {self.rms:.2e}, max {self.largest:.2e}"


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest allowed `Error.rms` against the float64 scan, for one dtype."""

    output: float
    gradient: float
    extreme: float
    """Outputs and gradients on gates, keys and betas at the edge of the contract."""


TOLERANCE = {
    "float64": Tolerance(output=1e-13, gradient=1e-13, extreme=1e-12),
    "float32": Tolerance(output=1e-6, gradient=2e-6, extreme=5e-5),
}
FLOOR_RATIO = 1.2
"""16-bit inputs: largest allowed error over that of the exact recurrence on the same rounded inputs."""


def error(x, reference) -> Error:
    """Compare in float64; an error against an all-zero reference is absolute, and a NaN anywhere gives NaN."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape:
        raise AssertionError(f"shape {x.shape} against a reference of shape {reference.shape}")
    if x.size == 0:
        return Error(0.0, 0.0)
    rms, largest = np.sqrt(np.mean(reference**2)), np.max(np.abs(reference))
    return Error(float(np.sqrt(np.mean((x - reference) ** 2)) / (rms or 1.0)), float(np.max(np.abs(x - reference)) / (largest or 1.0)))


def assert_close(name: str, x, reference, tolerance: float) -> None:
    """Raise AssertionError unless `error(x, reference).rms <= tolerance`; the message holds both numbers."""
    found = error(x, reference)
    if not found.rms <= tolerance:
        raise AssertionError(f"{name}: {found} exceeds {tolerance:.1e}")


class Problem(NamedTuple):
    """A call of a recurrence and the cotangents of its two results."""

    inputs: Inputs
    initial_state: jax.Array
    do: jax.Array
    dstate: jax.Array
    segment_ids: jax.Array | None = None

    def astype(self, dtype) -> "Problem":
        """Cast q, k, v and do to `dtype`; gates, beta and states stay at least float32."""
        low = lambda x: x.astype(dtype)
        high = lambda x: None if x is None else x.astype(jnp.promote_types(jnp.float32, dtype))
        q, k, v, g, beta = self.inputs
        return Problem(Inputs(low(q), low(k), low(v), high(g), high(beta)), high(self.initial_state), low(self.do), high(self.dstate), self.segment_ids)


def make_problem(spec: OpSpec, key: jax.Array, *, segment_ids=None, **shapes) -> Problem:
    """Ordinary inputs of `spec.make_inputs(**shapes)`, a random initial state and random cotangents."""
    inputs = spec.make_inputs(key, **shapes)
    B, _, HV, V = inputs.v.shape
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    state = jax.random.normal(keys[0], (B, HV, inputs.k.shape[-1], V))
    do = jax.random.normal(keys[1], inputs.v.shape).astype(inputs.v.dtype)
    return Problem(inputs, state, do, jax.random.normal(keys[2], state.shape), segment_ids)


def results(spec: OpSpec, problem: Problem, *, implementation: str | None, chunk_size: int = 64) -> dict[str, jax.Array]:
    """Outputs, final state and every gradient by name: o, final_state, dq, dk, dv, dg, dbeta, dinitial_state."""
    return _results(spec.name, problem, implementation, chunk_size)


def _run(name, problem, implementation, chunk_size):
    spec = ops.REGISTRY[name]

    def f(inputs, state):
        call = getattr(ops, name)
        keywords = dict(segment_ids=problem.segment_ids, implementation=implementation, chunk_size=chunk_size)
        return tuple(spec.call(call, inputs, initial_state=state, **keywords))

    (o, final_state), pull = jax.vjp(f, problem.inputs, problem.initial_state)
    gradients, dinitial_state = pull((problem.do, problem.dstate))
    named = {f"d{argument}": getattr(gradients, argument) for argument in spec.arguments}
    return {"o": o, "final_state": final_state, **named, "dinitial_state": dinitial_state}


_results = jax.jit(_run, static_argnums=(0, 2, 3))


def oracle(spec: OpSpec, problem: Problem) -> dict[str, np.ndarray]:
    """`results` of the scan in float64, as NumPy arrays."""
    problem = jax.tree.map(np.asarray, problem)
    with x64():
        double = jax.tree.map(jnp.asarray, problem).astype(jnp.float64)
        return jax.tree.map(np.asarray, results(spec, double, implementation="scan"))


def errors(spec: OpSpec, problem: Problem, *, implementation: str | None, chunk_size: int = 64) -> dict[str, Error]:
    """Error of each result of an implementation against the float64 scan on the very same inputs."""
    reference = oracle(spec, problem)
    found = results(spec, problem, implementation=implementation, chunk_size=chunk_size)
    return {name: error(found[name], reference[name]) for name in reference}


def floor_ratios(spec: OpSpec, problem: Problem, dtype, *, implementation: str | None) -> dict[str, tuple[Error, float]]:
    """For 16-bit inputs: error against the scan on the unrounded inputs, and that error over the irreducible floor.

    The floor is the error of the float64 scan on the same rounded inputs: what rounding the inputs costs whoever computes.
    """
    exact, rounded = oracle(spec, problem), problem.astype(dtype)
    floor = oracle(spec, rounded)
    found = results(spec, rounded, implementation=implementation)
    table = {name: (error(found[name], exact[name]), error(floor[name], exact[name]).rms) for name in exact}
    return {name: (err, err.rms / floor) for name, (err, floor) in table.items()}


@contextlib.contextmanager
def x64():
    """float64 inside, whatever the setting outside."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
