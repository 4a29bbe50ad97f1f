"""The two walks over chunks, one program a head and block of state columns: the state, or its gradient, stays in registers.

r = beta (v - k_in S)       y = T r        o = scale (q_in S + qk y)         S <- total S + k_out^T y
dy = scale qk^T do + k_out dS              dr = T^T dy                       dS <- total dS + scale q_in^T do - k_in^T beta dr
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.plan import Plan, dot, load, once, store, terms


def forward_walk(plan: Plan, v, beta, q_in, k_in, k_out, total, qk, solve, initial, o, final, *states):
    """v, o [T, block]; beta [T]; total [N, K]; initial, final [K, block]; in terms q_in, k_in, k_out [T, K], qk, solve [T, C] and, if they
    are wanted, states [N, K, block], those before every chunk."""

    def step(n, state):
        own = pl.ds(n * plan.C, plan.C)
        carried = terms(plan, state)
        if states:
            store(states[0], carried, n)
        r = beta[own][:, None] * (v[own, :].astype(jnp.float32) - dot(plan, load(k_in, own), carried))
        y = terms(plan, dot(plan, load(solve, own), r))
        out = dot(plan, load(qk, own), y, onto=dot(plan, load(q_in, own), carried))
        o[own, :] = (plan.scale * out).astype(o.dtype)
        return dot(plan, load(k_out, own), y, (0, 0), total[n, :][:, None] * state)

    final[...] = lax.fori_loop(0, total.shape[0], step, initial[...])


def backward_walk(plan: Plan, do, beta, q_in, k_in, k_out, total, qk, solve, dfinal, dr, dends, dinitial):
    """do [T, block]; dfinal, dinitial [K, block]; in terms dr [T, block] and dends [N, K, block], the gradients of the states after every
    chunk; the rest as in the forward."""
    N = total.shape[0]

    def step(m, dstate):
        n = N - 1 - m
        own = pl.ds(n * plan.C, plan.C)
        carried = terms(plan, dstate)
        store(dends, carried, n)
        dout = do[own, :]
        dy = dot(plan, load(k_out, own), carried, onto=plan.scale * dot(plan, once(plan, load(qk, own)), dout, (0, 0)))
        found = dot(plan, load(solve, own), dy, (0, 0))
        store(dr, terms(plan, found), own)
        from_outputs = plan.scale * dot(plan, load(q_in, own), dout, (0, 0))
        return total[n, :][:, None] * dstate + from_outputs - dot(plan, load(k_in, own), beta[own][:, None] * found, (0, 0))

    dinitial[...] = lax.fori_loop(0, N, step, dfinal[...])
