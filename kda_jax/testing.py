"""The one error metric, the one tolerance table, and the float64 oracle that every implementation is held to."""

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
    """Largest allowed `Error.rms` against the float64 recurrence, for one dtype."""

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
    """Compare in float64. A reference too small for float32 to hold counts as zero, and an error against zero is absolute."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape:
        raise AssertionError(f"shape {x.shape} against a reference of shape {reference.shape}")
    if x.size == 0:
        return Error(0.0, 0.0)
    scale = lambda size: size if size > np.finfo(np.float32).tiny else 1.0
    rms, largest = np.sqrt(np.mean(reference**2)), np.max(np.abs(reference))
    return Error(float(np.sqrt(np.mean((x - reference) ** 2)) / scale(rms)), float(np.max(np.abs(x - reference)) / scale(largest)))


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
        return Problem(
            Inputs(low(q), low(k), low(v), high(g), high(beta)), high(self.initial_state), low(self.do), high(self.dstate), self.segment_ids
        )


def make_problem(spec: OpSpec, key: jax.Array, *, B=2, T=100, H=2, HV=4, K=16, V=8, decay=None, segment_ids=None) -> Problem:
    """Ordinary inputs of `spec.make_inputs`, a random initial state and random cotangents."""
    inputs = spec.make_inputs(key, B=B, T=T, H=H, HV=HV, K=K, V=V, decay=decay)
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
        return tuple(call(*spec.arrays(inputs), initial_state=state, **keywords))

    (o, final_state), pull = jax.vjp(f, problem.inputs, problem.initial_state)
    gradients, dinitial_state = pull((problem.do, problem.dstate))
    named = {f"d{argument}": getattr(gradients, argument) for argument in spec.arguments}
    return {"o": o, "final_state": final_state, **named, "dinitial_state": dinitial_state}


_results = jax.jit(_run, static_argnums=(0, 2, 3))


def oracle(spec: OpSpec, problem: Problem) -> dict[str, np.ndarray]:
    """The results of the recurrence in float64 NumPy, one token at a time, with its derivative written out by hand.

    It shares no code with the library: no JAX, no autodiff, no `ops.segments`. It is slow and obvious on purpose.
    """
    cast = lambda x: None if x is None else np.asarray(x, np.float64)
    q, k, v, g, beta = map(cast, problem.inputs)
    share = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, share, 2) * q.shape[-1] ** -0.5, np.repeat(k, share, 2)
    v, beta = v.copy(), np.ones(v.shape[:3]) if beta is None else beta.copy()
    alpha = np.ones((*v.shape[:3], 1)) if g is None else np.exp(g if g.ndim == 4 else g[..., None])
    padding, reset = _read_segments(problem.segment_ids, v.shape[:2])
    q[padding], k[padding], v[padding], beta[padding], alpha[padding] = 0, 0, 0, 0, 1
    alpha[reset] = 0

    B, T, HV, _ = v.shape
    states, values = [cast(problem.initial_state)], []
    o = np.zeros(v.shape)
    for t in range(T):
        decayed = alpha[:, t, ..., None] * states[-1]
        read = np.einsum("bhkv,bhk->bhv", decayed, k[:, t]) if spec.delta else 0
        values.append(beta[:, t, :, None] * (v[:, t] - read))
        states.append(decayed + k[:, t, ..., None] * values[-1][..., None, :])
        o[:, t] = np.einsum("bhkv,bhk->bhv", states[-1], q[:, t])

    do, dS = cast(problem.do), cast(problem.dstate)
    dq, dk, dv, dalpha, dbeta = (np.zeros_like(x) for x in (q, k, v, alpha, beta))
    for t in reversed(range(T)):
        decayed = alpha[:, t, ..., None] * states[t]
        dS = dS + q[:, t, ..., None] * do[:, t, :, None, :]
        dq[:, t] = np.einsum("bhkv,bhv->bhk", states[t + 1], do[:, t])
        dk[:, t] = np.einsum("bhkv,bhv->bhk", dS, values[t])
        dvalue = np.einsum("bhkv,bhk->bhv", dS, k[:, t])
        dv[:, t] = beta[:, t, :, None] * dvalue
        if spec.delta:
            read = np.einsum("bhkv,bhk->bhv", decayed, k[:, t])
            dbeta[:, t] = np.sum(dvalue * (v[:, t] - read), -1)
            dk[:, t] -= np.einsum("bhkv,bhv->bhk", decayed, dv[:, t])
            dS = dS - k[:, t, ..., None] * dv[:, t, :, None, :]
        drow = np.sum(dS * states[t], -1)
        dalpha[:, t] = drow if alpha.shape[-1] > 1 else np.sum(drow, -1, keepdims=True)
        dS = alpha[:, t, ..., None] * dS

    dg = np.where((padding | reset)[..., None, None], 0, alpha * dalpha)
    for x in (dq, dk, dv, dbeta):
        x[padding] = 0
    grouped = lambda x: x.reshape(B, T, HV // share, share, -1).sum(3)
    named = {"dq": grouped(dq) * q.shape[-1] ** -0.5, "dk": grouped(dk), "dv": dv}
    if g is not None:
        named["dg"] = dg.reshape(g.shape)
    if spec.delta:
        named["dbeta"] = dbeta
    return {"o": o, "final_state": states[-1], **named, "dinitial_state": dS}


def _read_segments(segment_ids, shape):
    """(padding, reset) [B, T] by a plain walk along each row."""
    padding, reset = np.zeros(shape, bool), np.zeros(shape, bool)
    for b, row in enumerate(np.zeros(shape, int) if segment_ids is None else np.asarray(segment_ids)):
        current, positive = None, False
        for t, i in enumerate(row):
            if i < 0 or (i == 0 and positive):
                padding[b, t] = True
                continue
            reset[b, t] = current is not None and i != current
            current, positive = i, positive or i > 0
    return padding, reset


def errors(spec: OpSpec, problem: Problem, *, implementation: str | None, chunk_size: int = 64) -> dict[str, Error]:
    """Error of each result of an implementation against `oracle` on the very same inputs."""
    reference = oracle(spec, problem)
    found = results(spec, problem, implementation=implementation, chunk_size=chunk_size)
    return {name: error(found[name], reference[name]) for name in reference}


def floor_ratios(spec: OpSpec, problem: Problem, dtype, *, implementation: str | None) -> dict[str, tuple[Error, float]]:
    """For 16-bit inputs: error against the recurrence on the unrounded inputs, and that error over the irreducible floor.

    The floor is the error of the float64 recurrence on the same rounded inputs, with each result rounded once to the dtype it is
    returned in: what 16-bit arguments and results cost whoever computes.
    """
    exact, rounded = oracle(spec, problem), problem.astype(dtype)
    best = oracle(spec, rounded)
    found = results(spec, rounded, implementation=implementation)
    table = {}
    for name, x in found.items():
        floor = error(np.asarray(best[name].astype(x.dtype), np.float64), exact[name])
        table[name] = (error(x, exact[name]), error(x, exact[name]).rms / floor.rms)
    return table


@contextlib.contextmanager
def runnable(implementation: str | None):
    """What is traced inside runs here: a kernel of a device that is not here is interpreted, one of a TPU in buffers full of NaN."""
    if implementation == "pallas_tpu" and jax.default_backend() != "tpu":
        from jax.experimental.pallas import tpu as pltpu

        mode = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise"))
    elif implementation == "pallas_gpu" and jax.default_backend() != "gpu":
        from pallas_kernels.gpu import force_interpret_mode

        mode = force_interpret_mode()
    else:
        mode = contextlib.nullcontext()
    with mode:
        yield


@contextlib.contextmanager
def x64():
    """float64 inside, whatever the setting outside."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
