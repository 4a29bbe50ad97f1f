"""Layers against transformers: outputs, and gradients of the input and of every parameter: tests/golden/make.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax import layers
from kda_jax.hf import gpt2, kimi_linear
from kda_jax.hf.forms import MATRIX, TAPS, Tensor
from kda_jax.models import GPT2Config
from kda_jax.models.gpt2 import GPT2Block
from kda_jax.testing import assert_close
from kda_jax.train.state import flatten

CASES = {}
with np.load(Path(__file__).parents[1] / "golden" / "layers.npz") as file:
    for key in file.files:
        case, name = key.split("/", 1)
        CASES.setdefault(case, {})[name] = file[key]
TOLERANCE = 1e-5


def _part(table, prefix):
    """The entries of a family's table below a submodule."""
    below = {ours: tensor for ours, tensor in table.items() if ours.startswith(prefix)}
    return {ours.removeprefix(prefix): tensor._replace(name=tensor.name.removeprefix(prefix)) for ours, tensor in below.items()}


_MAMBA2 = {
    "in_proj.kernel": Tensor("in_proj.weight", MATRIX),
    "conv1d.kernel": Tensor("conv1d.weight", TAPS),
    "conv1d.bias": Tensor("conv1d.bias"),
    "A_log": Tensor("A_log"),
    "dt_bias": Tensor("dt_bias"),
    "D": Tensor("D"),
    "norm.scale": Tensor("norm.weight"),
    "out_proj.kernel": Tensor("out_proj.weight", MATRIX),
}
_ATTENTION = _part(kimi_linear.LAYER, "self_attn.")
_GATED_DELTANET = _ATTENTION | {
    "A_log": Tensor("A_log"),
    "a_proj.kernel": Tensor("a_proj.weight", MATRIX),
    "g_proj.kernel": Tensor("g_proj.weight", MATRIX),
}
_QWEN3_NEXT = _GATED_DELTANET | {
    "b_proj.kernel": Tensor("b_proj.weight", MATRIX),
    "o_norm.scale": Tensor("norm.weight"),
    "o_proj.kernel": Tensor("out_proj.weight", MATRIX),
}
_SIZES = {"hidden_size": 12, "num_heads": 3}
_MLA = {"kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_MOE = {"intermediate_size": 10, "num_experts": 6, "num_experts_per_token": 2, "num_groups": 2, "top_groups": 1}
_GDN = {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "head_v_dim": 5}
LAYERS = {
    "kda": (lambda rngs: layers.KimiDeltaAttention(**_SIZES, head_dim=8, rngs=rngs), _ATTENTION),
    "mla": (lambda rngs: layers.MultiHeadLatentAttention(**_SIZES, **_MLA, rngs=rngs), _ATTENTION),
    "moe": (
        lambda rngs: layers.MoE(hidden_size=12, **_MOE, routed_scaling_factor=1.7, rngs=rngs),
        _part(kimi_linear.LAYER, "block_sparse_moe."),
    ),
    "gpt2_block": (lambda rngs: GPT2Block(GPT2Config(n_embd=12, n_head=3, n_inner=20, n_layer=1), rngs), gpt2.LAYER),
    "mamba2": (lambda rngs: layers.Mamba2(hidden_size=12, num_heads=4, head_dim=6, state_size=8, rngs=rngs), _MAMBA2),
    "gated_deltanet": (lambda rngs: layers.GatedDeltaNet(hidden_size=12, **_GDN, rngs=rngs), _GATED_DELTANET),
    "qwen3_next": (lambda rngs: layers.GatedDeltaNet(hidden_size=12, **_GDN, rngs=rngs), _QWEN3_NEXT),
}


def read(table, path, shape, golden, kind):
    """Our array at `path`, from the weights or the gradients of a golden case."""
    tensor = table[path]
    if "{e}" in tensor.name:
        return np.stack([_read(tensor, golden[f"{kind}/{tensor.name.replace('{e}', str(e))}"], shape[1:]) for e in range(shape[0])])
    return _read(tensor, golden[f"{kind}/{tensor.name}"], shape)


def _read(tensor, stored, shape):
    assert tensor.form.accepts(stored.shape, shape), (tensor.name, stored.shape, shape)
    return tensor.form.read(stored, shape)


@pytest.mark.parametrize("case", LAYERS)
def test_layer(case):
    make, table = LAYERS[case]
    golden = CASES[case]
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    filled = [
        jax.tree.unflatten(
            jax.tree.structure(state),
            [jnp.asarray(read(table, path, leaf.shape, golden, "weights")) for path, leaf in flatten(nnx.to_pure_dict(state)).items()],
        )
        for state in (params, rest)
    ]

    def f(params, x):
        out = nnx.merge(graphdef, params, filled[1])(x)
        return out[0] if isinstance(out, tuple) else out

    y, pull = jax.jit(lambda params, x: jax.vjp(f, params, x))(filled[0], golden["x"])
    gradients, dx = pull(jnp.asarray(golden["dy"]))
    assert_close("y", y, golden["y"], TOLERANCE)
    assert_close("dx", dx, golden["dx"], TOLERANCE)
    for path, gradient in flatten(nnx.to_pure_dict(gradients)).items():
        assert_close(path, gradient, read(table, path, gradient.shape, golden, "gradients"), TOLERANCE)
