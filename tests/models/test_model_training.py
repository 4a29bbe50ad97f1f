"""Models under gradients: rematerialisation, scan against loop, memory and compile time against depth, 16 bits, and that they learn."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_cases import CONFIGS, TOKENS, VOCAB, build, filled, forward

from kda_jax import models
from kda_jax.layers import RouterBias
from kda_jax.layers.params import FLOAT32, cast, has_name
from kda_jax.models import LinearAttentionConfig, presets


def loss_of(model, tokens):
    """Mean next-token cross entropy."""
    logits = model(tokens).logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def hybrid(layers, **fields):
    """The tiny hybrid with `layers` layers, every fourth MLA."""
    full = tuple(range(4, layers + 1, 4))
    config = presets.tiny_hybrid()
    lists = {"kda_layers": tuple(i for i in range(1, layers + 1) if i not in full), "full_attn_layers": full}
    linear = dataclasses.replace(config.linear_attn_config, **lists)
    return dataclasses.replace(config, num_hidden_layers=layers, linear_attn_config=linear, **fields)


def thin_hybrid(**fields):
    """The tiny hybrid as two scanned KDA layers and an MLA layer, all with experts."""
    lists = LinearAttentionConfig(head_dim=16, num_heads=4, kda_layers=(1, 2), full_attn_layers=(3,))
    thin = {"num_hidden_layers": 3, "linear_attn_config": lists, "first_k_dense_replace": 0}
    return dataclasses.replace(presets.tiny_hybrid(), **thin, **fields)


def lower_gradients(config, T=64):
    """The training program of `config`, not compiled; nothing is allocated."""
    model = nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    return jax.jit(jax.value_and_grad(loss_of)).lower(model, jax.ShapeDtypeStruct((4, T), jnp.int32))


@functools.cache
def loss_and_gradients(remat):
    model = filled(thin_hybrid(remat=remat))
    assert model.layers.layout.repeats == 2
    return jax.jit(jax.value_and_grad(loss_of))(model, jnp.asarray(TOKENS[:, :24]))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_neither_loss_nor_gradients(remat):
    (loss, grads), (expected, expected_grads) = loss_and_gradients(remat), loss_and_gradients("none")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))


def test_every_parameter_has_a_gradient_but_the_router_bias():
    _, grads = loss_and_gradients("none")
    largest = {jax.tree_util.keystr(path): np.abs(g).max() for path, g in jax.tree_util.tree_leaves_with_path(nnx.state(grads))}
    still = [name for name, value in largest.items() if value == 0]
    assert len(still) == len(jax.tree.leaves(nnx.state(grads, RouterBias))) > 0
    assert all("e_score_correction_bias" in name for name in still)


def test_scanned_periods_equal_a_loop_over_the_layers_R160():
    """Logits to 1e-6 of the largest, expert counts exactly, in the order of the layers."""
    model, tokens = build("kimi_linear"), jnp.asarray(TOKENS)
    assert model.stack.layout.repeats > 1

    @jax.jit
    def loop(model, tokens):
        x, counts = model.embed_tokens(tokens), []
        for i in range(model.config.num_hidden_layers):
            out = model.stack.layer(i)(x)
            x = out.x
            counts += [] if out.counts is None else [out.counts]
        return model.head(x), jnp.stack(counts)

    logits, counts = loop(model, tokens)
    out = forward(model, tokens)
    np.testing.assert_allclose(out.logits, logits, rtol=0, atol=1e-6 * np.abs(logits).max())
    np.testing.assert_array_equal(out.aux["expert_counts"], counts)
    np.testing.assert_array_equal(counts.sum(1), [tokens.size * 2] * 3)


def test_program_does_not_grow_with_depth_R157():
    """48 layers of the hybrid are as much program text as 12."""

    def lines(layers):
        model = nnx.eval_shape(lambda: models.build(hybrid(layers), nnx.Rngs(0)))
        return len(forward.lower(model, jax.ShapeDtypeStruct((2, 64), jnp.int32)).as_text().splitlines())

    assert lines(12) == lines(48)


def temp_bytes(config):
    return lower_gradients(config, T=128).compile().memory_analysis().temp_size_in_bytes


def test_full_remat_keeps_one_input_per_layer_R156():
    """Sixteen more layers take sixteen more [B, T, D] and nothing else: the policy is inside the scan."""
    config = dataclasses.replace(CONFIGS["linear_attention"], remat="full")
    short, long = (temp_bytes(dataclasses.replace(config, num_hidden_layers=n)) for n in (16, 32))
    assert long - short <= 1.05 * 16 * (4 * 128 * config.hidden_size * 4)


@pytest.mark.slow
def test_full_remat_of_a_hybrid_of_twice_the_layers_R156():
    short, long = (temp_bytes(hybrid(n, remat="full")) for n in (16, 32))
    assert long < 1.1 * short


@pytest.mark.slow
def test_compile_time_does_not_grow_with_depth_R157():
    """A 48-layer hybrid compiles within 1.3 times the time of a 12-layer one."""
    seconds = {}
    for layers in (12, 48, 12, 48):
        lowered = lower_gradients(hybrid(layers))
        start = time.process_time()
        lowered.compile()
        seconds.setdefault(layers, []).append(time.process_time() - start)
    assert min(seconds[48]) < 1.3 * min(seconds[12]), seconds


@pytest.mark.parametrize("name", CONFIGS)
def test_dtypes_of_a_16_bit_model(name):
    """Logits and attention cache in bfloat16, recurrent states in float32, and what goes in as a cache comes out with the same types."""
    model = build(name)
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, cast(state, jnp.bfloat16))
    kept = [has_name(path, FLOAT32) for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)) if leaf.dtype == jnp.float32]
    assert all(kept)
    for T, segment_ids in [(1, None), (5, jnp.ones((2, 5), jnp.int32))]:
        cache = jax.eval_shape(lambda m: m.init_cache(2, 16, jnp.bfloat16), model)
        tokens = jax.ShapeDtypeStruct((2, T), jnp.int32)
        out = jax.eval_shape(forward, model, tokens, cache, segment_ids)
        assert out.logits.dtype == jnp.bfloat16
        assert jax.tree.structure(out.cache) == jax.tree.structure(cache)
        assert [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(out.cache)] == [
            (a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(cache)
        ]


def test_building_allocates_nothing_under_eval_shape():
    """The 48B preset in seconds."""
    start = time.process_time()
    model = nnx.eval_shape(lambda: models.build(presets.kimi_linear_48b_a3b(), nnx.Rngs(0)))
    assert time.process_time() - start < 10
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))
    assert model.layers.layout.bodies == 7


def test_parameters_carry_logical_axes():
    """One name per axis, the stacked axis of the periods left out."""
    model = build("kimi_linear")
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes, stacked = variable.get_metadata()["axes"], "periods" in path
        assert len(axes) == variable.ndim - stacked, path
        assert set(axes) <= {"embed", "heads", "mlp", "experts", "vocab", "latent", None}


def test_same_seed_same_weights():
    a, b, c = (jax.tree.leaves(nnx.state(models.build(presets.gpt2_tiny(), nnx.Rngs(seed)))) for seed in (0, 0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_initial_loss_is_that_of_a_uniform_guess():
    model = models.build(presets.tiny_hybrid(), nnx.Rngs(0))
    logits = forward(model, jnp.asarray(TOKENS)).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean()
    assert abs(float(loss) - np.log(VOCAB)) < 0.1


@pytest.mark.slow
def test_a_tiny_hybrid_learns_to_copy():
    """Six random tokens, a separator, the same six: after 120 steps the second half is known."""
    model = models.build(thin_hybrid(), nnx.Rngs(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def copy_loss(model, tokens):
        logits = model(tokens[:, :-1]).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 6:], tokens[:, 7:]).mean()

    @jax.jit
    def step(model, opt_state, tokens):
        loss, grads = jax.value_and_grad(copy_loss)(model, tokens)
        updates, opt_state = optimizer.update(grads, opt_state)
        return jax.tree.map(jnp.add, model, updates), opt_state, loss

    opt_state, losses = optimizer.init(model), []
    for i in range(120):
        half = np.random.RandomState(i).randint(1, 9, (32, 6))
        tokens = jnp.asarray(np.concatenate([half, np.zeros((32, 1), int), half], axis=1), jnp.int32)
        model, opt_state, loss = step(model, opt_state, tokens)
        losses.append(float(loss))
    assert losses[0] > np.log(8)
    assert np.mean(losses[-10:]) < 0.3, losses[::10]
