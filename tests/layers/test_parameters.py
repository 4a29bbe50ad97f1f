"""Names, shapes, axes, initial values of parameters, and the two name tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixer_cases import MIXERS, build

from kda_jax import layers
from kda_jax.layers import params
from kda_jax.layers.initializers import inverse_softplus_of_time_step, log_uniform


def names(module):
    return sorted(".".join(path) for path in nnx.to_flat_state(nnx.state(module)).paths)


def test_kda_has_the_released_names_and_shapes():
    """Kimi Linear's tensor list; a kernel is the transpose of a released weight."""
    kda = nnx.eval_shape(lambda: layers.KimiDeltaAttention(hidden_size=20, num_heads=3, head_dim=8, rngs=nnx.Rngs(0)))
    shapes = {".".join(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(kda))}
    assert shapes == {
        "q_proj.kernel": (20, 24),
        "k_proj.kernel": (20, 24),
        "v_proj.kernel": (20, 24),
        "q_conv1d.kernel": (24, 4),
        "k_conv1d.kernel": (24, 4),
        "v_conv1d.kernel": (24, 4),
        "A_log": (3,),
        "dt_bias": (24,),
        "f_a_proj.kernel": (20, 8),
        "f_b_proj.kernel": (8, 24),
        "b_proj.kernel": (20, 3),
        "g_a_proj.kernel": (20, 8),
        "g_b_proj.kernel": (8, 24),
        "o_norm.scale": (8,),
        "o_proj.kernel": (24, 20),
    }


def test_mla_and_moe_have_the_released_names():
    assert names(build("mla")) == sorted(
        ["q_proj.kernel", "kv_a_proj_with_mqa.kernel", "kv_a_layernorm.scale", "kv_b_proj.kernel", "o_proj.kernel"]
    )
    k3 = ["q_a_proj.kernel", "q_a_layernorm.scale", "q_b_proj.kernel", "g_proj.kernel"]
    assert names(build("mla_k3")) == sorted([*k3, *(name for name in names(build("mla")) if name != "q_proj.kernel")])
    sizes = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 5, "num_experts_per_token": 1}
    moe = nnx.eval_shape(lambda: layers.MoE(**sizes, rngs=nnx.Rngs(0)))
    assert names(moe) == sorted(
        ["gate.kernel", "gate.e_score_correction_bias", "experts.w1", "experts.w3", "experts.w2"]
        + [f"shared_experts.{name}_proj.kernel" for name in ("gate", "up", "down")]
    )


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_are_float32_and_carry_one_axis_name_per_axis(name):
    for leaf in jax.tree.leaves(nnx.state(build(name)), is_leaf=lambda a: isinstance(a, nnx.Variable)):
        assert leaf.dtype == jnp.float32
        assert len(leaf.axes) == leaf.ndim
        assert set(leaf.axes) <= {"embed", "heads", "mlp", "experts", "vocab", "latent", None}


def test_gates_begin_as_published():
    keys = jax.random.split(jax.random.key(0), 3)
    A = np.exp(log_uniform(keys[0], (20000,), 1.0, 16.0))
    assert 1 <= A.min() < 1.01
    assert 15.99 < A.max() <= 16
    np.testing.assert_allclose(A.mean(), 8.5, rtol=0.02)
    dt = np.log1p(np.exp(np.asarray(inverse_softplus_of_time_step(keys[1], (20000,)))))
    assert dt.min() >= 0.999e-3
    assert dt.max() <= 0.1001
    np.testing.assert_allclose(np.median(dt), 1e-2, rtol=0.05)
    assert np.all(np.isfinite(log_uniform(keys[2], (20000,), 0.0, 16.0)))


def test_initial_values_of_layers():
    def make():
        gpt2 = layers.GPT2Attention(hidden_size=96, num_heads=3, residual_initializer_range=0.005, rngs=nnx.Rngs(0))
        mixers = {name: MIXERS[name](rngs=nnx.Rngs(0)) for name in ("kda", "kda_k3", "mamba2")} | {"gpt2": gpt2}
        return {name: nnx.to_pure_dict(nnx.state(mixer)) for name, mixer in mixers.items()}

    fresh = jax.tree.map(np.asarray, jax.jit(make)())
    np.testing.assert_array_equal(fresh["kda_k3"]["A_log"], 0)
    assert 0 <= fresh["kda"]["A_log"].min() <= fresh["kda"]["A_log"].max() <= np.log(16)
    np.testing.assert_array_equal(fresh["kda"]["o_norm"]["scale"], 1)
    np.testing.assert_array_equal(fresh["mamba2"]["D"], 1)
    assert 0.4 < np.abs(fresh["mamba2"]["conv1d"]["kernel"]).max() <= 0.5
    np.testing.assert_array_equal(fresh["gpt2"]["c_attn"]["bias"], 0)
    np.testing.assert_allclose(fresh["gpt2"]["c_attn"]["kernel"].std(), 0.02, rtol=0.02)
    np.testing.assert_allclose(fresh["gpt2"]["c_proj"]["kernel"].std(), 0.005, rtol=0.05)


def test_tables_go_by_name_whatever_the_path_looks_like():
    assert params.has_name("blocks.periods.0.mixer.A_log", params.FLOAT32)
    assert params.has_name(("mixer", "o_norm", "scale"), params.NO_DECAY)
    assert not params.has_name("mixer.o_norm.scale", params.FLOAT32)
    assert not params.has_name("mixer.q_conv1d.kernel", params.NO_DECAY)


@pytest.mark.parametrize("as_tree", [nnx.state, lambda m: nnx.to_pure_dict(nnx.state(m)), lambda m: m])
def test_cast_and_decay_go_by_name(as_tree):
    """R079 and the stacked-layer trap: rank says nothing, also with one more axis on every parameter."""
    tree = as_tree(jax.tree.map(lambda a: jnp.stack([a, a]), build("mamba2")))
    low = params.cast(tree, jnp.bfloat16)
    decay = params.decay_mask(tree)
    assert jax.tree.structure(low) == jax.tree.structure(tree)
    float32, decayed = set(), set()
    for (path, leaf), keep in zip(jax.tree_util.tree_leaves_with_path(low), jax.tree.leaves(decay), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        assert leaf.dtype in (jnp.float32, jnp.bfloat16)
        float32 |= {name} if leaf.dtype == jnp.float32 else set()
        decayed |= {name} if keep else set()
    assert float32 == {"A_log", "D", "dt_bias"}
    assert decayed == {"in_proj.kernel", "conv1d.kernel", "out_proj.kernel"}
