"""TPU kernels lower for the TPU on any machine, and refuse what they cannot do in one sentence (R163, R170)."""

import jax
import jax.numpy as jnp
import pytest

from kda_jax.ops.experts import grouped_dot
from pallas_kernels.tpu import chunk_kda_from_logits, chunk_recurrence


def abstract(decay, delta, B=1, T=128, H=8, HV=8, K=128, V=128, dtype=jnp.bfloat16):
    make = jax.ShapeDtypeStruct
    a = {"q": make((B, T, H, K), dtype), "k": make((B, T, H, K), dtype), "v": make((B, T, HV, V), dtype)}
    if decay == "head":
        a["g"] = make((B, T, HV), jnp.float32)
    elif decay != "none":
        a["g"] = make((B, T, HV, K), jnp.float32)
    if delta:
        a["beta"] = make((B, T, HV), jnp.float32)
    return a


def export(f, *args):
    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(*args)
    assert "tpu_custom_call" in exported.mlir_module()
    return exported


def gradients(decay, **options):
    bound = -5.0 if decay == "bounded" else None

    def f(a, do):
        out, pull = jax.vjp(lambda a: chunk_recurrence(**a, lower_bound=bound, **options)[0], a)
        return out, pull(do)[0]

    return f


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ["none", "head", "channel", "bounded"])
def test_lowers(decay, delta):
    a = abstract(decay, delta, H=4, HV=8 if decay == "head" else 4)
    assert export(gradients(decay), a, a["v"]).mlir_module().count("tpu_custom_call") >= 2


@pytest.mark.parametrize(
    "shape",
    [
        {"K": 64, "V": 64, "dtype": jnp.float32},
        {"K": 256, "V": 256, "H": 2, "HV": 2},
        {"H": 3, "HV": 3, "T": 100},
        {"H": 1, "HV": 1, "T": 1},
        {"H": 12, "HV": 24, "dtype": jnp.float16},
    ],
)
def test_lowers_shapes(shape):
    a = abstract("head", True, **shape)
    export(gradients("head"), a, a["v"])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_fused_entry_lowers(lower_bound):
    a = abstract("channel", True, H=4, HV=4)
    head = jax.ShapeDtypeStruct((4,), jnp.float32)
    bias, reset = jax.ShapeDtypeStruct((4, 128), jnp.float32), jax.ShapeDtypeStruct((1, 128), jnp.bool_)

    def loss(q, k, v, x, beta, A_log, dt_bias, reset):
        return chunk_kda_from_logits(q, k, v, x, beta, A_log, dt_bias, reset=reset, lower_bound=lower_bound)[0].astype(jnp.float32).sum()

    export(jax.grad(loss, argnums=tuple(range(7))), *a.values(), head, bias, reset)


def test_remat_and_scan_lower():
    """R165: the kernels inside jax.checkpoint and jax.lax.scan, residuals kept or dropped by name."""
    a = abstract("head", True, H=2, HV=2)
    policy = jax.checkpoint_policies.save_only_these_names("chunk_states", "chunk_inverse")

    def loss(a):
        layer = jax.checkpoint(lambda v, _: (chunk_recurrence(**a | {"v": v})[0], None), policy=policy)
        return jax.lax.scan(layer, a["v"], None, length=2)[0].astype(jnp.float32).sum()

    export(jax.grad(loss), a)


@pytest.mark.parametrize(("names", "kernels"), [((), 3), (("chunk_states", "chunk_inverse", "chunk_o", "chunk_final"), 2)])
def test_kept_by_name_the_forward_runs_once(names, kernels):
    """With what follows needing the output again: forward and backward, and the forward once more where nothing is kept."""
    a, policy = abstract("head", True, H=2, HV=2), jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(lambda a: jnp.sum(jnp.sin(chunk_recurrence(**a)[0].astype(jnp.float32))), policy=policy)
    assert export(jax.value_and_grad(layer), a).mlir_module().count("tpu_custom_call") == kernels


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"q": (1, 128, 3, 128), "k": (1, 128, 3, 128)}, ValueError, "multiple of the heads"),
        ({"k": (1, 128, 8, 64)}, ValueError, "expected q, k"),
        ({"g": (1, 128, 8, 64)}, ValueError, "g "),
        ({"beta": (1, 128, 4)}, ValueError, "beta"),
        ({"chunk_size": 48}, ValueError, "chunk_size 48"),
        ({"lower_bound": -6.0}, ValueError, "lower_bound -6.0"),
        ({"q": (1, 128, 8, 512), "k": (1, 128, 8, 512), "g": (1, 128, 8)}, NotImplementedError, "up to 256"),
    ],
)
def test_refusals(change, kind, words):
    a = abstract("channel", True)
    options = {n: x for n, x in change.items() if n in ("chunk_size", "lower_bound")}
    a |= {n: jax.ShapeDtypeStruct(x, a[n].dtype) for n, x in change.items() if n not in options}
    with pytest.raises(kind, match=words):
        jax.eval_shape(lambda a: chunk_recurrence(**a, **options), a)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("M", "D", "F", "E"), [(4096, 3584, 3072, 28), (8, 2304, 1024, 64), (100, 60, 20, 3)])
def test_lowers_grouped_products(M, D, F, E, dtype):
    """The product and both gradients, at the widths of Kimi K3 and of a decode step, and off every grid."""

    def both(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, "pallas_tpu"), x, w)
        return y, pull(dy)

    make = jax.ShapeDtypeStruct
    args = make((M, D), dtype), make((E, D, F), dtype), make((E,), jnp.int32), make((M, F), dtype)
    assert export(both, *args).mlir_module().count("tpu_custom_call") >= 3
