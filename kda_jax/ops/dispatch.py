"""From a public call to an implementation: checks, padding and sequence boundaries, choice, and its explanation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kda_jax import sharding
from kda_jax.ops.chunkwise import chunkwise
from kda_jax.ops.context import in_segments
from kda_jax.ops.norms import l2_norm
from kda_jax.ops.segments import segments
from kda_jax.ops.spec import REGISTRY, Inputs, OpSpec, RecurrenceOutput, need_decays, need_floats, need_integers
from kda_jax.sharding import Shards, local_map

IMPLEMENTATIONS = ("scan", "xla", "pallas_tpu", "pallas_gpu")
HOPPER = ("H100", "H20", "H800")  # in the names of the GPUs that `implementation=None` runs kernels on: H200 and GH200 too


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why the others were not taken."""

    op: str
    chosen: str
    reasons: dict[str, str]
    """For each implementation, why it was or was not chosen."""

    def __str__(self) -> str:
        lines = (f"  {'->' if name == self.chosen else '  '} {name:<11}{reason}" for name, reason in self.reasons.items())
        return "\n".join((f"{self.op}: {self.chosen}", *lines))


def run(
    spec: OpSpec,
    inputs: Inputs,
    *,
    scale,
    initial_state,
    segment_ids,
    chunk_size: int,
    implementation: str | None,
    normalize: bool = False,
) -> RecurrenceOutput:
    """Check the arguments, rewrite padding and boundaries as plain inputs, and call the implementation.

    `normalize` asks for the op on L2-normalised q and k; a kernel that does so itself saves a pass over both.
    """
    _validate(spec, inputs, initial_state, segment_ids, chunk_size, implementation)
    K = inputs.q.shape[-1]
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(*(x for x in inputs if x is not None)))
    state = _zero_state(inputs, dtype) if initial_state is None else initial_state.astype(dtype)
    if segment_ids is not None:
        inputs = _with_boundaries(inputs, segment_ids)
    if inputs.v.size == 0:  # no tokens, no rows, or values without width
        return RecurrenceOutput(jnp.zeros_like(inputs.v), state)
    chosen = choose(spec, inputs, implementation, chunk_size).chosen
    options = {"chunk_size": chunk_size}
    if normalize and chosen == "pallas_tpu":
        options["normalize"] = True
    elif normalize:
        inputs = inputs._replace(q=l2_norm(inputs.q), k=l2_norm(inputs.k))
    runner = functools.partial(_RUNNERS[chosen], spec, **options)
    scale = scale_of(spec, K, scale)

    def local(shards: Shards, *parts):
        *parts, state = parts
        run_local = runner if shards.count("time") == 1 else functools.partial(in_segments, runner, shards)
        o, state = run_local(Inputs(*parts), scale=scale, initial_state=state)
        return o.astype(inputs.v.dtype), state

    return RecurrenceOutput(*local_map(local, (*inputs, state), names_of(inputs), (_TOKENS, _STATE)))


_TOKENS, _STATE = ("batch", "time", "heads", None), ("batch", "heads", None, None)


def names_of(inputs: Inputs) -> tuple:
    """Logical names of the axes of `inputs` and of a state: a recurrence runs on each device's rows, heads and segment of time."""
    return *(None if x is None else _TOKENS[: x.ndim] for x in inputs), _STATE


def choose(spec: OpSpec, inputs: Inputs, implementation: str | None, chunk_size: int = 64) -> Explanation:
    """The implementation a call takes. A name means exactly that one.

    Raises:
        NotImplementedError: the named implementation does not apply, with the reason.
    """
    T = inputs.q.shape[1]
    refused = {"pallas_tpu": _refused_by_tpu_kernel(inputs, chunk_size), "pallas_gpu": _refused_by_gpu_kernel(inputs, chunk_size)}
    if implementation is not None:
        if refused.get(implementation):
            raise NotImplementedError(f"{spec.name}: implementation {implementation!r} does not apply: {refused[implementation]}")
        named = {name: "named by the caller" if name == implementation else "not named by the caller" for name in IMPLEMENTATIONS}
        return Explanation(spec.name, implementation, named | {name: why for name, why in refused.items() if why})
    refused["pallas_tpu"] = refused["pallas_tpu"] or not_on("tpu")
    refused["pallas_gpu"] = refused["pallas_gpu"] or not_on("gpu") or _untuned()
    chosen = "scan" if T == 1 else next(name for name in ("pallas_tpu", "pallas_gpu", "xla") if not refused.get(name))
    kernel = "one token needs no chunk" if T == 1 else "fused chunkwise kernel"
    reasons = {
        "scan": "one token: the step itself" if T == 1 else f"one token at a time over T = {T} is slower than chunks",
        "xla": "one token needs no chunk" if T == 1 else "chunkwise on any device, exact for every gate",
        "pallas_tpu": kernel,
        "pallas_gpu": kernel,
    }
    return Explanation(spec.name, chosen, reasons | {name: why for name, why in refused.items() if why})


def _refused_by_tpu_kernel(inputs: Inputs, chunk_size: int) -> str | None:
    """Why the TPU kernel cannot take these arguments on any machine; None if it can."""
    K, V = inputs.q.shape[-1], inputs.v.shape[-1]
    if inputs.v.size == 0:
        return "there is nothing to compute"
    if max(K, V) > 256:
        return f"it takes K and V up to 256, got {K} and {V}"
    if chunk_size not in (16, 32, 64, 128):
        return f"it takes a chunk_size of 16, 32, 64 or 128, got {chunk_size}"
    if any(x is not None and x.dtype == jnp.float64 for x in inputs):
        return "TPUs have no float64"
    from pallas_kernels.tpu import vmem_refusal

    return vmem_refusal(*inputs, chunk_size)


def _refused_by_gpu_kernel(inputs: Inputs, chunk_size: int) -> str | None:
    """Why the GPU kernels cannot take these arguments here; None if they can."""
    if inputs.v.size == 0:
        return "there is nothing to compute"
    from pallas_kernels.gpu import interpreting, refusal

    if sharding.parts("time", inputs.q.shape[1]) > 1:
        return "the mesh splits time"
    return refusal(*inputs, chunk_size) or (None if interpreting() else _elsewhere("gpu"))


def _elsewhere(platform: str) -> str | None:
    here = sharding.platform()
    return None if here == platform or (here, platform) == ("cuda", "gpu") else f"this process computes on {here}"


def _untuned() -> str | None:
    """Why a call that names nothing does not take the GPU kernels on this GPU."""
    kind = sharding.device_kind()
    return None if any(name in kind for name in HOPPER) else f"measured on Hopper GPUs alone: on this {kind} it must be named"


def not_on(platform: str) -> str | None:
    """Why a call that names nothing does not take the kernels of a platform."""
    if why := _elsewhere(platform):
        return why
    if jax.device_count() > 1 and jax.sharding.get_abstract_mesh().empty:
        return "several devices and no mesh (`jax.set_mesh`): a kernel cannot be partitioned automatically"
    return None


def explain(op: str | Callable, *arguments, implementation: str | None = None) -> Explanation:
    """Print and return which implementation a call would take and why the others were not chosen.

    Args:
        op: a recurrence or its name, e.g. `ops.kda` or "kda".
        arguments: its arrays, or anything with their shape and dtype.
        implementation: as in the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kda_jax import ops
        >>> x = jax.ShapeDtypeStruct((1, 128, 4, 32), jnp.float32)
        >>> beta = jax.ShapeDtypeStruct((1, 128, 4), jnp.float32)
        >>> ops.explain("kda", x, x, x, x, beta).chosen
        kda: xla
        ...
    """
    spec, inputs = find(op, arguments)
    _validate(spec, inputs, None, None, 64, implementation)
    explanation = choose(spec, inputs, implementation)
    print(explanation)
    return explanation


def find(op: str | Callable, arguments: tuple) -> tuple[OpSpec, Inputs]:
    """The recurrence that `op` is or names, and its arrays by name."""
    name = op if isinstance(op, str) else op.__name__
    if name not in REGISTRY:
        raise ValueError(f"op: no recurrence is named {name!r}; there are {', '.join(REGISTRY)}")
    spec = REGISTRY[name]
    if len(arguments) != len(spec.arguments):
        raise ValueError(f"{name} takes {len(spec.arguments)} arrays ({', '.join(spec.arguments)}), got {len(arguments)}")
    return spec, Inputs(**(dict.fromkeys(Inputs._fields) | dict(zip(spec.arguments, arguments, strict=True))))


def run_scan(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: jax.Array, chunk_size: int = 0) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.scan` of the op's step over time: the definition of the op."""
    del chunk_size
    dtype = initial_state.dtype

    def body(state, token):
        token = Inputs(*token)
        if token.g is not None and "g" not in spec.arguments:  # an op without decay still forgets at the boundaries of a packed row
            state = jnp.exp(token.g)[..., None, None] * state
        return spec.step(state, *spec.arrays(token), scale=scale)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), tuple(inputs))
    state, o = jax.lax.scan(body, initial_state, tokens)
    return jnp.moveaxis(o, 0, 1), state


def run_xla(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """The chunkwise form in plain jnp."""
    return chunkwise(*inputs, scale=scale, initial_state=initial_state, chunk_size=chunk_size)


def run_pallas_tpu(
    spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: jax.Array, chunk_size: int, normalize: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The fused TPU kernels, forward and backward."""
    from pallas_kernels.tpu import chunk_recurrence

    with tpu_only(spec.name):
        return chunk_recurrence(*one_dtype(inputs), initial_state, scale=scale, chunk_size=chunk_size, normalize=normalize)


def run_pallas_gpu(spec: OpSpec, inputs: Inputs, *, scale: float, initial_state: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """The fused GPU kernels, forward and backward."""
    from pallas_kernels.gpu import chunk_kda

    return chunk_kda(*one_dtype(inputs), initial_state, scale=scale, chunk_size=chunk_size)


def one_dtype(inputs: Inputs) -> Inputs:
    """q, k and v in the widest of their dtypes, as kernels take them."""
    dtype = jnp.result_type(*inputs[:3])
    return inputs._replace(q=inputs.q.astype(dtype), k=inputs.k.astype(dtype), v=inputs.v.astype(dtype))


@contextlib.contextmanager
def tpu_only(name: str):
    """Turn Pallas's refusal to run a TPU kernel elsewhere into this library's."""
    try:
        yield
    except ValueError as error:
        if "interpret mode" not in str(error):
            raise
        raise NotImplementedError(f"{name}: implementation 'pallas_tpu' does not apply: {not_on('tpu')}") from error


_RUNNERS = {"scan": run_scan, "xla": run_xla, "pallas_tpu": run_pallas_tpu, "pallas_gpu": run_pallas_gpu}


def check_logits(spec, logits: Inputs, parameters: dict, initial_state, segment_ids, chunk_size, implementation) -> None:
    """The sentences of an op for its arguments before gates and norms, and for the gate's parameters by name."""
    need_floats(spec.name, parameters)
    _validate(spec, logits, initial_state, segment_ids, chunk_size, implementation, logits=True)


def without_padding(logits: Inputs, segment_ids, gate: float = 0.0) -> Inputs:
    """Arguments with zeros for what a padding token holds, NaN perhaps, and `gate` for its g and beta, or their logits: done before norms
    and gates, what is computed from them, and its derivative, is finite.
    """
    if segment_ids is None:
        return logits
    valid = segments(segment_ids).valid
    mask = lambda x, value: None if x is None else jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, value)
    return Inputs(*map(mask, logits, (0, 0, 0, gate, gate)))


def _with_boundaries(inputs: Inputs, segment_ids) -> Inputs:
    """Padding becomes a token that does nothing; the first token of a new sequence gets a decay of -inf, which forgets all before it."""
    inputs, reset = without_padding(inputs, segment_ids), segments(segment_ids).reset
    g = jnp.zeros(inputs.v.shape[:3], jnp.float32) if inputs.g is None else inputs.g
    return inputs._replace(g=jnp.where(reset.reshape(*reset.shape, *(1,) * (g.ndim - 2)), -jnp.inf, g))


def _zero_state(inputs: Inputs, dtype):
    """Zeros, formed from the inputs so that on a mesh they are sharded like the state that follows."""
    B, _, H, K = inputs.k.shape
    HV, V = inputs.v.shape[2:]
    if inputs.k.shape[1] == 0:
        return jnp.zeros((B, HV, K, V), dtype)
    k = jnp.repeat(inputs.k[:, 0], HV // H, axis=1)
    return jnp.zeros_like(k[..., None] * inputs.v[:, 0, :, None, :], dtype)


def scale_of(spec: OpSpec, K: int, scale) -> float:
    """The number that outputs are multiplied by.

    Raises:
        ValueError: it is traced.
    """
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"{spec.name}: scale is traced, and kernels are compiled for one: pass a number, multiply o by what is computed")
    return K**-0.5 if scale is None else float(scale)


def _validate(spec, inputs, initial_state, segment_ids, chunk_size, implementation, logits=False):
    """One sentence for every way the arguments can be wrong; `logits` stand in the places of g and beta, and are called so."""
    q, k, v, g, beta = inputs
    called = {"g": "x", "beta": "beta_logits"} if logits else {}

    def need(ok, name, x, expected):
        if not ok:
            raise ValueError(f"{spec.name}: {called.get(name, name)} has shape {tuple(jnp.shape(x))}, expected {expected}")

    need_floats(spec.name, {called.get(name, name): getattr(inputs, name) for name in spec.arguments})
    need(len(q.shape) == 4, "q", q, "[B, T, H, K]")
    B, T, H, K = q.shape
    need(H > 0 and K > 0, "q", q, "[B, T, H, K] with H and K at least 1")
    need(k.shape == q.shape, "k", k, f"the shape of q, {q.shape}")
    need(len(v.shape) == 4 and v.shape[:2] == (B, T), "v", v, f"[B, T, HV, V] with B, T = {B}, {T}")
    HV = v.shape[2]
    need(HV % H == 0, "v", v, f"a number of value heads (axis 2) that is a multiple of q's {H} heads")
    shapes = {"head": (B, T, HV), "channel": (B, T, HV, K)}
    if g is not None:
        allowed = [shapes[d] for d in spec.decays]
        need(tuple(g.shape) in allowed, "g", g, " or ".join(map(str, allowed)))
        if not logits:
            need_decays(spec.name, g)
    if beta is not None:
        need(tuple(beta.shape) == (B, T, HV), "beta", beta, f"{(B, T, HV)}")
    if initial_state is not None:
        need_floats(spec.name, dict(initial_state=initial_state))
        need(initial_state.shape == (B, HV, K, v.shape[-1]), "initial_state", initial_state, f"{(B, HV, K, v.shape[-1])}")
    if segment_ids is not None:
        need_integers(spec.name, dict(segment_ids=segment_ids))
        need(tuple(segment_ids.shape) == (B, T), "segment_ids", segment_ids, f"{(B, T)}")
    if not isinstance(chunk_size, int) or chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"{spec.name}: chunk_size is {chunk_size}, expected a power of two")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{spec.name}: implementation is {implementation!r}, expected None or one of {', '.join(IMPLEMENTATIONS)}")
