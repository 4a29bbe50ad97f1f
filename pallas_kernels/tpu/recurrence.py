"""The differentiable recurrence: pads, chooses the tile, and ties the two kernels together."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.tpu.backward import backward
from pallas_kernels.tpu.forward import forward
from pallas_kernels.tpu.plan import LANES, Plan

LOWEST_BOUND = -5.0  # STRIP rows of it stay inside float32's range when a strip's keys are divided by their decay
CHUNKS = (16, 32, 64, 128)
HEADS_PER_STEP = 16


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

    The chunk form is Kimi Linear's (arXiv 2510.26692) in solve form: y = T beta (v - k~ S), T the inverse of a unit lower triangular matrix.

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
      NotImplementedError: float64 inputs, or K or V above 256.

    Numerics: bfloat16 inputs use one-pass bfloat16 products with float32 sums, state and decays; float32 inputs six-pass products.
    Outputs before a token do not depend, to the bit, on anything after it.
    """
    check(q, k, v, g, beta, initial_state, reset, chunk_size, lower_bound)
    kind = v.dtype
    if kind == jnp.float16:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    decay = {None: "none", 3: "head", 4: "channel"}[None if g is None else g.ndim]
    if decay == "channel" and lower_bound is not None:
        decay = "bounded"
    if reset is not None and decay != "bounded":
        if g is None:
            g, decay = jnp.zeros(v.shape[:3], jnp.float32), "head"
        g = jnp.where(reset.reshape(reset.shape + (1,) * (g.ndim - 2)), -jnp.inf, g)
        reset = None
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, plan = make_plan(q, k, v, decay, beta is not None, chunk_size, scale, normalize, reset is not None)
    o, final = chunk_core(plan, kernel_inputs(plan, q, k, v, g, beta, initial_state, reset))
    B, T, HV, V = v.shape
    return o[:, :T, :, :V].astype(kind), jnp.swapaxes(final, 2, 3)[:, :, : q.shape[-1], :V]


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


def heads_per_step(H: int, HV: int) -> int:
    """The most value heads of one grid step: a divisor of HV that holds whole groups, in blocks of 8 heads unless it is all of them."""
    group = HV // H
    legal = lambda n: HV % n == 0 and n % group == 0 and (n == HV or (n % 8 == 0 and n // group % 8 == 0))
    return max((n for n in range(1, HEADS_PER_STEP + 1) if legal(n)), default=0)


def make_plan(q, k, v, decay, delta, chunk_size, scale, normalize, reset) -> tuple[jax.Array, jax.Array, Plan]:
    """The tile, and q and k, repeated to HV heads where a step cannot hold whole groups."""
    H, HV = q.shape[2], v.shape[2]
    heads = heads_per_step(H, HV)
    if not heads and H < HV:
        q, k = (jnp.repeat(x, HV // H, 2) for x in (q, k))
        H, heads = HV, heads_per_step(HV, HV)
    heads = heads or HV
    pack = next(p for p in (LANES // chunk_size, 4, 2, 1) if p * chunk_size <= LANES and heads % p == 0)
    width = lambda n: -(-n // LANES) * LANES
    plan = Plan(
        decay=decay,
        delta=delta,
        C=chunk_size,
        K=width(q.shape[-1]),
        V=width(v.shape[-1]),
        heads=heads,
        pack=pack,
        group=HV // H,
        scale=scale,
        normalize=normalize,
        reset=reset,
        exact=v.dtype == jnp.float32,
    )
    return q, k, plan


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros at the ends of the axes; nothing where the shape is right."""
    widths = [(0, n - m) for m, n in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x


def kernel_inputs(plan: Plan, q, k, v, g, beta, initial_state, reset) -> dict[str, jax.Array]:
    """Pads T to whole chunks (zeros: decay 1, beta 0, nothing written) and K, V to whole lanes; columns [B, T, HV] to [B, S, T, heads]."""
    B, T, HV = v.shape[:3]
    T = -(-T // plan.C) * plan.C

    def column(x, heads):
        return jnp.swapaxes(pad(x.astype(jnp.float32), (B, T, x.shape[2])).reshape(B, T, -1, heads), 1, 2)

    inputs = {"q": pad(q, (B, T, q.shape[2], plan.K)), "k": pad(k, (B, T, k.shape[2], plan.K)), "v": pad(v, (B, T, HV, plan.V))}
    if g is not None:
        inputs["g"] = column(g, plan.heads) if g.ndim == 3 else pad(g, (B, T, HV, plan.K))
    if beta is not None:
        inputs["beta"] = column(beta, plan.heads)
    if reset is not None:
        inputs["reset"] = column(jnp.where(reset, -jnp.inf, 0.0)[..., None], 1)
    if initial_state is not None:
        inputs["initial"] = jnp.swapaxes(pad(initial_state.astype(jnp.float32), (B, HV, plan.K, plan.V)), 2, 3)
    return inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunk_core(plan: Plan, inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Kernel-shaped inputs (see forward) -> (o, final [B, HV, V, K])."""
    out = forward(plan, inputs, save=False)
    return out["o"], out["final"]


def core_forward(plan: Plan, inputs: dict[str, jax.Array]):
    out = forward(plan, inputs, save=True)
    saved = {n: checkpoint_name(out[n], f"chunk_{n}") for n in ("states", "inverse") if n in out}
    return (out["o"], out["final"]), (inputs, saved)


def core_backward(plan: Plan, saved, cotangents):
    inputs, residuals = saved
    do, dfinal = cotangents
    taken = {n: x for n, x in inputs.items() if n != "initial"}
    out = backward(plan, {**taken, **residuals, "do": do, "dfinal": dfinal})
    return ({n: out["d" + n].astype(x.dtype) if "d" + n in out else None for n, x in inputs.items()},)


chunk_core.defvjp(core_forward, core_backward)
