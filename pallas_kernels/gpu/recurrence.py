"""The differentiable recurrence: pads, calls the kernels and ties them together."""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.derivatives import first_only
from pallas_kernels.gpu.calls import backward, forward
from pallas_kernels.gpu.plan import Plan, Tuning

CHUNKS = (16, 32, 64)
WIDEST = 128
MOST_CHUNKS = 65535  # of a grid's second axis
_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def force_interpret_mode():
    """What is traced inside runs in plain jax on any device, as `jax.experimental.pallas.tpu.force_tpu_interpret_mode` does for TPUs."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def interpreting() -> bool:
    """Whether `force_interpret_mode` is on."""
    return _interpreted.get()


def refusal(q, k, v, g, beta, chunk_size: int) -> str | None:
    """Why these kernels cannot take such arguments (anything with a shape and dtype) on any machine; None if they can."""
    K, V, T = q.shape[-1], v.shape[-1], q.shape[1]
    if g is None or g.ndim != 4 or beta is None:
        return "it takes decays per channel with the delta rule, KDA alone"
    if max(K, V) > WIDEST:
        return f"it takes K and V up to {WIDEST}, got {K} and {V}"
    if chunk_size not in CHUNKS:
        return f"it takes a chunk_size of 16, 32 or 64, got {chunk_size}"
    if -(-T // chunk_size) > MOST_CHUNKS:
        return f"it takes up to {MOST_CHUNKS} chunks, got {T} tokens in chunks of {chunk_size}"
    if any(x.dtype == jnp.float64 for x in (q, k, v, g, beta)):
        return "it computes in float32, and an argument is float64"
    return None


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chunkwise S_t = (I - beta k k^T) Diag(e^g) S_(t-1) + beta k v^T, o_t = scale q^T S_t on a GPU, with gradients.

    The chunk form is Kimi Linear's (arXiv 2510.26692) in solve form: y = T beta (v - k_in S), T a unit lower triangular inverse.

    Args:
      q, k: [B, T, H, K] float32, bfloat16 or float16; K at most 128.
      v: [B, T, HV, V], same type; HV a multiple of H: query head j serves value heads j HV/H ... V at most 128.
      g: [B, T, HV, K] natural log decays <= 0 (-inf: forget everything); any float type, float32 inside.
      beta: [B, T, HV].
      initial_state: [B, HV, K, V].
      scale: multiplies the output; K^-0.5 by default.
      chunk_size: 16, 32 or 64.
      tuning: speed only.

    Returns:
      o [B, T, HV, V] in v's type; final_state [B, HV, K, V] float32.

    Raises:
      NotImplementedError: what `refusal` says.

    Remat: a `jax.checkpoint` policy that saves "chunk_states", "chunk_inverse", "chunk_o" and "chunk_final" by name spares the forward its
    second run.
    Numerics: products are bfloat16 with float32 sums, a float32 operand the sum of two bfloat16 terms, or of three for float32 inputs,
    which keeps all its bits. State and decays are float32. Outputs before a token do not depend, to the bit, on anything after it.
    """
    why = refusal(q, k, v, g, beta, chunk_size)
    if why:
        raise NotImplementedError(f"the GPU kernels: {why}")
    T, K = q.shape[1], q.shape[3]
    HV, V = v.shape[2:]
    dtype = v.dtype
    if dtype == jnp.float16:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    plan = Plan(
        C=chunk_size,
        K=padded(K),
        V=padded(V),
        HV=HV,
        group=HV // q.shape[2],
        scale=float(K**-0.5 if scale is None else scale),
        terms=3 if v.dtype == jnp.float32 else 2,
        interpret=interpreting(),
        tuning=tuning or Tuning(),
    )
    tokens = -(-T // chunk_size) * chunk_size
    q, k, g = (pad(x, (None, tokens, None, plan.K)) for x in (q, k, g))
    v, beta = pad(v, (None, tokens, None, plan.V)), pad(beta.astype(jnp.float32), (None, tokens, None))
    state = pad(initial_state.astype(jnp.float32), (None, None, plan.K, plan.V))
    o, final = core(plan, q, k, v, g, beta, state)
    return o[:, :T, :, :V].astype(dtype), final[:, :, :K, :V]


def padded(n: int) -> int:
    """The next power of two from 16 on: what Triton's tiles and products take."""
    return max(16, 1 << (n - 1).bit_length())


def pad(x: jax.Array, shape: tuple[int | None, ...]) -> jax.Array:
    """Zeros at the ends of the axes; None leaves an axis. A padded token decays nothing and writes nothing."""
    widths = [(0, 0 if n is None else n - m) for m, n in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(plan: Plan, q, k, v, g, beta, state) -> tuple[jax.Array, jax.Array]:
    """Arrays padded to the plan -> o [B, T, HV, V], final state [B, HV, K, V]."""
    o, final, _ = forward(plan, q, k, v, g, beta, state, save=False)
    return o, final


def core_forward(plan: Plan, q, k, v, g, beta, state):
    o, final, saved = _forward_saving(plan, q, k, v, g, beta, state)
    o, final = checkpoint_name(o, "chunk_o"), checkpoint_name(final, "chunk_final")
    names = "chunk_states", "chunk_inverse", "chunk_inverse"  # the products come with the inverse: policies know that name
    saved = [checkpoint_name(x, name) for x, name in zip(saved, names, strict=True)]  # all kept, the forward does not run again
    return (o, final), (q, k, v, g, beta, *saved)


def core_backward(plan: Plan, residuals, cotangents):
    return _backward(plan, *residuals, *cotangents)


_forward_saving, _backward = first_only(functools.partial(forward, save=True)), first_only(backward)
core.defvjp(core_forward, core_backward)
