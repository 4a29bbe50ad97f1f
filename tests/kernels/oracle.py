"""The recurrence token by token in float64 numpy, with its adjoint written out, and inputs for it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    """Arrays of one call: g None, [B, T, HV] or [B, T, HV, K]; beta None or [B, T, HV]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray | None
    initial_state: np.ndarray
    do: np.ndarray
    dfinal: np.ndarray

    def rounded(self, dtype) -> "Case":
        """float64 arrays with the values that the kernel sees: q, k, v, do in `dtype`, the rest in float32."""
        low = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)
        high = lambda x: None if x is None else np.asarray(np.asarray(x, np.float32), np.float64)
        q, k, v, g, beta, state, do, dfinal = self
        return Case(low(q), low(k), low(v), high(g), high(beta), high(state), low(do), high(dfinal))


def make_case(decay: str, delta: bool, T: int, *, B=1, H=1, HV=1, K=16, V=16, seed=0) -> Case:
    """Unit q and k; ordinary decays of the kind; beta in (0, 1) with some exact zeros."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    normal = lambda *shape: rng.standard_normal(shape)
    g = {
        "none": None,
        "head": -rng.exponential(1.0, (B, T, HV)),
        "channel": -rng.exponential(1.0, (B, T, HV, K)),
        "bounded": -5.0 * rng.uniform(0, 1, (B, T, HV, K)),
    }[decay]
    beta = None
    if delta:
        beta = rng.uniform(0, 1, (B, T, HV))
        beta[:, ::5] = 0.0
    q, k, v, do = unit(normal(B, T, H, K)), unit(normal(B, T, H, K)), normal(B, T, HV, V), normal(B, T, HV, V)
    return Case(q, k, v, g, beta, normal(B, HV, K, V), do, normal(B, HV, K, V))


def recurrence(case: Case) -> dict[str, np.ndarray]:
    """o, final and the gradient of every input, scale K^-0.5."""
    q, k, v, g, beta, state, do, dfinal = case
    B, T, HV = v.shape[:3]
    H, K = q.shape[2:]
    scale, group = K**-0.5, HV // H
    q, k = np.repeat(q, group, 2), np.repeat(k, group, 2)
    decay = np.ones((B, T, HV, 1)) if g is None else np.exp(g)
    decay = decay if decay.ndim == 4 else decay[..., None]
    b = np.ones((B, T, HV)) if beta is None else beta
    o, decayed, errors = np.zeros_like(v), [], []
    for t in range(T):
        state = state * decay[:, t, ..., None]
        error = v[:, t] - (0 if beta is None else np.einsum("bhk,bhkv->bhv", k[:, t], state))
        decayed.append(state)
        errors.append(error)
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], b[:, t, :, None] * error)
        o[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], state)
    final, d_state = state, dfinal
    dq, dk, dv, db = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(b)
    dg = np.zeros((B, T, HV, K))
    for t in reversed(range(T)):
        written = b[:, t, :, None] * errors[t]
        after = decayed[t] + np.einsum("bhk,bhv->bhkv", k[:, t], written)
        dq[:, t] = scale * np.einsum("bhkv,bhv->bhk", after, do[:, t])
        d_state = d_state + scale * np.einsum("bhk,bhv->bhkv", q[:, t], do[:, t])
        dk[:, t] = np.einsum("bhkv,bhv->bhk", d_state, written)
        d_written = np.einsum("bhkv,bhk->bhv", d_state, k[:, t])
        db[:, t] = (d_written * errors[t]).sum(-1)
        dv[:, t] = b[:, t, :, None] * d_written
        if beta is not None:
            dk[:, t] -= np.einsum("bhkv,bhv->bhk", decayed[t], dv[:, t])
            d_state = d_state - np.einsum("bhk,bhv->bhkv", k[:, t], dv[:, t])
        dg[:, t] = (d_state * decayed[t]).sum(-1)
        d_state = d_state * decay[:, t, ..., None]
    by_query = lambda x: x.reshape(B, T, H, group, K).sum(3)
    out = {"o": o, "final": final, "q": by_query(dq), "k": by_query(dk), "v": dv, "initial_state": d_state}
    if g is not None:
        out["g"] = dg if g.ndim == 4 else dg.sum(-1)
    if beta is not None:
        out["beta"] = db
    return out


def error(x, reference) -> float:
    """RMS(x - reference) / RMS(reference); absolute against a reference of zeros."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    assert x.shape == reference.shape, (x.shape, reference.shape)
    size = np.sqrt(np.mean(reference**2))
    return float(np.sqrt(np.mean((x - reference) ** 2)) / (size or 1.0))
