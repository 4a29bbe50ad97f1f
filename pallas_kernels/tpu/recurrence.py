"""The differentiable recurrence: pads, chooses the tile, and ties the two kernels together."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.derivatives import first_only
from pallas_kernels.tpu.backward import backward
from pallas_kernels.tpu.forward import forward
from pallas_kernels.tpu.plan import LANES, Plan
from pallas_kernels.tpu.tiles import choose_tile, whole_heads

LOWEST_BOUND = -5.0  # STRIP rows of it stay inside float32's range when a strip's keys are divided by their decay
CHUNKS = (16, 32, 64, 128)
NO_TOKEN = -1.0e30  # a logit whose sigmoid and softplus are exactly zero


def chunk_recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    beta: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    reset: jax.Array | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    lower_bound: float | None = None,
    normalize: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Chunkwise S_t = (I - beta k k^T) Diag(e^g) S_(t-1) + beta k v^T, o_t = scale q^T S_t on a TPU, with gradients.

    The chunk form is Kimi Linear's (arXiv 2510.26692) in solve form: y = T beta (v - k~ S), T a unit lower triangular inverse.

    Args:
      q, k: [B, T, H, K] float32, bfloat16 or float16; K at most 256.
      v: [B, T, HV, V], same type; HV a multiple of H: query head j serves value heads j HV/H ... V at most 256.
      g: natural log decays <= 0 (-inf: forget everything): None, [B, T, HV] or [B, T, HV, K]; any float type, float32 inside.
      beta: [B, T, HV]; None turns the delta rule off (S_t = Diag(e^g) S_(t-1) + k v^T).
      initial_state: [B, HV, K, V]; None is zeros.
      reset: [B, T] boolean, true where the state is forgotten before the token (the first of a new sequence).
      scale: multiplies the output; K^-0.5 by default.
      chunk_size: 16, 32, 64 or 128 tokens per grid step.
      lower_bound: a promise that every g [B, T, HV, K] is at least this (in [-5, 0)); lets the kernel factor 16-row blocks.
      normalize: L2-normalise q and k over K first, x / sqrt(sum x^2 + 1e-6).

    Returns:
      o [B, T, HV, V] in v's type; final_state [B, HV, K, V] float32.

    Raises:
      ValueError: a shape or option outside the above.
      NotImplementedError: float64 inputs, K or V above 256, or blocks that do not fit in VMEM (`vmem_refusal` says it beforehand).

    Remat: a `jax.checkpoint` policy that saves "chunk_states", "chunk_inverse" (delta rule), "chunk_o" and "chunk_final" by name spares the
    forward its second run.
    Numerics: bfloat16 inputs use one-pass bfloat16 products with float32 sums, state and decays; float32 inputs six-pass products.
    Outputs before a token do not depend, to the bit, on anything after it.
    """
    check(q, k, v, g, beta, initial_state, reset, chunk_size, lower_bound)
    decay = {None: "none", 3: "head", 4: "channel"}[None if g is None else g.ndim]
    if decay == "channel" and lower_bound is not None:
        decay = "bounded"
    if reset is not None and decay in ("none", "head"):
        g, decay = jnp.where(reset[..., None], -jnp.inf, jnp.zeros(v.shape[:3], jnp.float32) if g is None else g), "head"
        reset = None
    sequence = {"g": g, "beta": beta, "reset": reset}
    return run(q, k, v, sequence, initial_state, decay=decay, scale=scale, chunk_size=chunk_size, normalize=normalize, gate=None)


def chunk_kda_from_logits(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    reset: jax.Array | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    lower_bound: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`chunk_recurrence` on L2-normalised q and k, beta = sigmoid(beta_logits), and the gate computed in the kernel.

    g = -exp(A_log) softplus(x + dt_bias) (Kimi Linear, arXiv 2510.26692), or with a lower bound in [-5, 0)
    g = lower_bound sigmoid(exp(A_log) (x + dt_bias)) (Kimi K3, arXiv 2607.24653, eq. 5).

    Args:
      x: [B, T, HV, K] gate logits, any float type; beta_logits: [B, T, HV]; A_log: [HV]; dt_bias: [HV, K].
      A token that is padding has logits x and beta_logits of NO_TOKEN: decay 1, nothing written. The rest as in chunk_recurrence.

    Returns:
      o [B, T, HV, V] in v's type; final_state [B, HV, K, V] float32.
    """
    check(q, k, v, x, beta_logits, initial_state, reset, chunk_size, lower_bound)
    HV, K = v.shape[2], q.shape[3]
    for name, y, shape in (("x", x, (*v.shape[:3], K)), ("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV, K))):
        if y.shape != shape:
            raise ValueError(f"{name} {y.shape} must be {shape}")
    sequence = {
        "g": x,
        "beta": jax.nn.sigmoid(beta_logits.astype(jnp.float32)),
        "reset": reset,
        "rate": jnp.broadcast_to(jnp.exp(A_log.astype(jnp.float32))[:, None], (HV, K)),
        "bias": dt_bias.astype(jnp.float32),
    }
    decay = "channel" if lower_bound is None else "bounded"
    return run(q, k, v, sequence, initial_state, decay=decay, scale=scale, chunk_size=chunk_size, normalize=True, gate=lower_bound or 0.0)


def chunk_states(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    beta: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`chunk_recurrence` with the state before every chunk, for snapshots of a prefix. Not differentiable.

    Args:
      As in chunk_recurrence.

    Returns:
      o [B, T, HV, V] in v's type; final_state [B, HV, K, V] and starts [B, ceil(T / chunk_size), HV, K, V], float32.
    """
    check(q, k, v, g, beta, initial_state, None, chunk_size, None)
    decay = {None: "none", 3: "head", 4: "channel"}[None if g is None else g.ndim]
    sequence = {"g": g, "beta": beta, "reset": None}
    plan, inputs = prepare_call(q, k, v, sequence, initial_state, decay, scale, chunk_size, False, None)
    out = forward(plan, repeated(plan, inputs), ("starts",))
    return *results(out["o"], out["final"], q, v), states_of(out["starts"], q, v)


def run(q, k, v, sequence, initial_state, *, decay, scale, chunk_size, normalize, gate) -> tuple[jax.Array, jax.Array]:
    """From checked arrays to the kernels and back; `sequence` holds g, beta, reset (or None) and, with a gate, rate and bias."""
    plan, inputs = prepare_call(q, k, v, sequence, initial_state, decay, scale, chunk_size, normalize, gate)
    return results(*chunk_core(plan, inputs), q, v)


def results(o: jax.Array, final: jax.Array, q: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the kernels return, cut to the caller's sizes."""
    T, HV, V = v.shape[1:]
    return o[:, :T, :HV, :V].astype(v.dtype), states_of(final, q, v)


def states_of(states: jax.Array, q: jax.Array, v: jax.Array) -> jax.Array:
    """[..., heads, V, K] of the kernels -> [..., HV, K, V]."""
    HV, V = v.shape[2:]
    return jnp.swapaxes(states, -2, -1)[..., :HV, : q.shape[-1], :V]


def prepare_call(q, k, v, sequence, initial_state, decay, scale, chunk_size, normalize, gate) -> tuple[Plan, dict[str, jax.Array]]:
    """The plan, and arrays padded to it."""
    K, V = q.shape[-1], v.shape[-1]
    if v.dtype == jnp.float16:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    H, HV = whole_heads(q.shape[2], v.shape[2])
    delta, exact = sequence["beta"] is not None, v.dtype == jnp.float32
    tile = choose_tile(decay, delta, H, HV, chunk_size, K, V, exact)
    plan = Plan(
        decay=decay,
        delta=delta,
        C=chunk_size,
        K=lanes_for(K),
        V=lanes_for(V),
        heads=tile.forward,
        backward_heads=tile.backward,
        pack=max(p for p in (1, 2, 4, 8) if p * chunk_size <= LANES and all(heads % p == 0 for heads in tile)),
        group=HV // H,
        share=v.shape[2] // q.shape[2] // (HV // H),
        scale=float(K**-0.5 if scale is None else scale),
        normalize=normalize,
        reset=sequence["reset"] is not None,
        gate=gate,
        exact=exact,
    )
    return plan, kernel_inputs(plan, q, k, v, sequence, initial_state, HV)


def lanes_for(n: int) -> int:
    return -(-n // LANES) * LANES


def check(q, k, v, g, beta, initial_state, reset, chunk_size, lower_bound) -> None:
    """Raises the sentences promised by chunk_recurrence."""
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"expected q, k [B, T, H, K] and v [B, T, HV, V], got q {q.shape}, k {k.shape}, v {v.shape}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if HV % H:
        raise ValueError(f"the value heads of v {v.shape} must be a multiple of the heads of q {q.shape}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must share a type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g is not None and g.shape not in ((B, T, HV), (B, T, HV, K)):
        raise ValueError(f"g {g.shape} must be {(B, T, HV)} or {(B, T, HV, K)}")
    for name, x, shape in (("beta", beta, (B, T, HV)), ("initial_state", initial_state, (B, HV, K, V)), ("reset", reset, (B, T))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} {x.shape} must be {shape}")
    if chunk_size not in CHUNKS:
        raise ValueError(f"chunk_size {chunk_size} must be one of {CHUNKS}")
    if lower_bound is not None and not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(f"lower_bound {lower_bound} must be in [{LOWEST_BOUND}, 0)")
    if v.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the TPU kernels take float32, bfloat16 or float16, not {v.dtype}")
    if max(K, V) > 2 * LANES:
        raise NotImplementedError(f"the TPU kernels take K and V up to {2 * LANES}, got K {K}, V {V}")


def pad(x: jax.Array, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    """`value` at the ends of the axes; nothing where the shape is right."""
    widths = [(0, n - m) for m, n in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x


def kernel_inputs(plan: Plan, q, k, v, sequence, initial_state, HV: int) -> dict[str, jax.Array]:
    """Pads T to whole chunks (decay 1, beta 0, nothing written), K and V to whole lanes, heads to HV."""
    B, T = v.shape[:2]
    T, H = -(-T // plan.C) * plan.C, HV // plan.group if plan.share == 1 else q.shape[2]
    inputs = {"q": pad(q, (B, T, H, plan.K)), "k": pad(k, (B, T, H, plan.K)), "v": pad(v, (B, T, HV, plan.V))}
    g, beta, reset = (sequence[n] for n in ("g", "beta", "reset"))
    if g is not None:
        g = g.astype(jnp.float32) if g.ndim == 3 or g.dtype == jnp.float16 else g
        inputs["g"] = pad(g, (B, T, HV) if g.ndim == 3 else (B, T, HV, plan.K), 0.0 if plan.gate is None else NO_TOKEN)
    if beta is not None:
        inputs["beta"] = pad(beta.astype(jnp.float32), (B, T, HV))
    if reset is not None:
        inputs["reset"] = pad(jnp.where(reset, -jnp.inf, 0.0), (B, T))[:, None, :, None]
    if plan.gate is not None:
        inputs |= {n: pad(sequence[n], (HV, plan.K)) for n in ("rate", "bias")}
    if initial_state is not None:
        inputs["initial"] = jnp.swapaxes(pad(initial_state.astype(jnp.float32), (B, HV, plan.K, plan.V)), 2, 3)
    return inputs


def repeated(plan: Plan, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """q and k with a head for every value head, where `plan.share` asks for it."""
    if plan.share == 1:
        return inputs
    whole = lambda x: pad(jnp.repeat(x, plan.share, 2), (*x.shape[:2], inputs["v"].shape[2], plan.K))
    return inputs | {n: whole(inputs[n]) for n in "qk"}


def summed(plan: Plan, gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Transpose of `repeated` for x [B, T, H, K]: the float32 gradients of its value heads, summed and rounded once."""
    B, T, H, K = x.shape
    return gradient[:, :, : H * plan.share].reshape(B, T, H, plan.share, K).sum(3).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunk_core(plan: Plan, inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Kernel-shaped inputs (see forward) -> (o, final [B, HV, V, K])."""
    out = forward(plan, repeated(plan, inputs))
    return out["o"], out["final"]


def core_forward(plan: Plan, inputs: dict[str, jax.Array]):
    out = _forward_saving(plan, repeated(plan, inputs))
    out = {n: checkpoint_name(x, f"chunk_{n}") for n, x in out.items()}  # with all of them kept, the forward does not run again
    return (out["o"], out["final"]), (inputs, {n: out[n] for n in ("states", "inverse") if n in out})


def core_backward(plan: Plan, saved, cotangents):
    inputs, residuals = saved
    do, dfinal = cotangents
    taken = {n: x for n, x in repeated(plan, inputs).items() if n != "initial"}
    out = _backward(plan, {**taken, **residuals, "do": do, "dfinal": dfinal})
    gradients = {n: out["d" + n] if "d" + n in out else None for n in inputs}
    if plan.share > 1:
        gradients |= {n: summed(plan, gradients[n], inputs[n]) for n in "qk"}
    return (gradients | {n: gradients[n].sum(0) for n in ("rate", "bias") if n in inputs},)


_forward_saving, _backward = first_only(functools.partial(forward, save=("states", "inverse"))), first_only(backward)
chunk_core.defvjp(core_forward, core_backward)
