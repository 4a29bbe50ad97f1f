"""The same problems in other libraries, which have to be installed: what `kda-jax bench --tpu-static OP --peer NAME` compiles.

Each takes its arrays in the layout it works in, so that no transpose counts against it, and does the norms, the gate and the sigmoid by its
own means where it has them.
"""

import functools
import importlib.util
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

from kda_jax import ops
from kda_jax.errors import UserError

MODULES = {"tokamax": "tokamax", "deltanet-tpu": "deltanet_tpu"}


def forward(peer: str, op: str, lower_bound: float | None, arrays: dict) -> tuple[Callable, dict]:
    """(function of its arrays, the shapes of those) for the arrays of `tpu_static.program`.

    Raises:
        UserError: the library is not installed, or has no kernel for the problem.
    """
    if importlib.util.find_spec(MODULES[peer]) is None:
        raise UserError(f"--peer {peer} measures a library that is not installed: pip install {peer}")
    if peer == "tokamax":
        if op != "kda" or lower_bound is None or arrays["q"].shape[2] != arrays["v"].shape[2]:
            raise UserError("tokamax has a TPU kernel for kda with a bounded gate (--lower-bound) and one value head per head, no other")
        heads_first = lambda x: jax.ShapeDtypeStruct((x.shape[2], *x.shape[:2], *x.shape[3:]), x.dtype)
        return functools.partial(_tokamax, lower_bound), {n: heads_first(x) if x.ndim > 2 else x for n, x in arrays.items()}
    if op not in ("kda", "gated_delta_rule"):
        raise UserError(f"deltanet-tpu is measured on kda and gated_delta_rule, not on {op}")
    return functools.partial(_deltanet_tpu, op, lower_bound), arrays


def _tokamax(lower_bound: float, arrays: dict) -> jax.Array:
    """Arrays [H, B, T, ...]; gate and norm inside its kernel."""
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["kda-jax"])
    q, k, v, x, beta_logits, A_log, dt_bias = (arrays[n] for n in ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias"))
    fused = dict(use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=lower_bound, implementation="mosaic")
    with tokamax.config.cross_compile(True):
        beta = jax.nn.sigmoid(beta_logits)
        return tokamax.ops.kimi_delta_attention(q, k, v, x, beta, a_log=A_log, delta_time_bias=dt_bias.reshape(-1), **fused)[0]


def _deltanet_tpu(op: str, lower_bound: float | None, arrays: dict) -> jax.Array:
    """Arrays [B, T, H, ...]; norm inside its kernel, the gate before it. It takes its kernel where the process runs on a TPU."""
    import deltanet_tpu

    q, k, v, x, beta_logits, A_log, dt_bias = (arrays[n] for n in ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias"))
    beta = jax.nn.sigmoid(beta_logits.astype(jnp.float32))
    g = ops.kda_gate(x, A_log, dt_bias, lower_bound=lower_bound) if op == "kda" else ops.gdn_gate(x, A_log, dt_bias)
    call = deltanet_tpu.chunk_kda if op == "kda" else deltanet_tpu.chunk_gdn
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        return call(q, k, v, g, beta, qk_l2norm=True)
