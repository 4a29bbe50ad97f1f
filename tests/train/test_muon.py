"""Muon and QK-clip against plain NumPy, matrix by matrix and head by head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import GPT2, HYBRID, make_step, random_batch, run_config

from kda_jax import models
from kda_jax.bench.hlo import bytes_by_kind, bytes_by_source, collectives
from kda_jax.checkpoint import Checkpoints
from kda_jax.config import OptimConfig
from kda_jax.errors import UserError
from kda_jax.models.config import LinearAttentionConfig
from kda_jax.sharding import MeshConfig, make_mesh, parameter_sharding
from kda_jax.train import loop
from kda_jax.train.metrics import dtype_table
from kda_jax.train.muon import MuonState, orthogonal, scale_by_muon
from kda_jax.train.optim import make_optimizer
from kda_jax.train.qk_clip import clip_query_keys
from kda_jax.train.state import flatten, initial_state, merge, shapes, state_shardings, structure
from kda_jax.train.step import Sums

STACKED = dataclasses.replace(
    HYBRID,
    num_hidden_layers=4,
    linear_attn_config=LinearAttentionConfig(head_dim=16, num_heads=2, kda_layers=(1, 3), full_attn_layers=(2, 4)),
    num_experts=3,
)
"""KDA, MLA, KDA, MLA: a period of two layers, stacked twice."""


def newton_schulz(m: np.ndarray) -> np.ndarray:
    """Jordan et al.'s loop on one float64 matrix."""
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def muon_update(m: np.ndarray) -> np.ndarray:
    return 0.2 * np.sqrt(max(m.shape)) * newton_schulz(m)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 2, 16, 16)])
def test_orthogonal_is_the_published_loop(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    found = np.asarray(orthogonal(jnp.asarray(x, jnp.float32)))
    wanted = np.stack([newton_schulz(m) for m in x.reshape(-1, *shape[-2:])]).reshape(shape)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    low = np.asarray(orthogonal(jnp.asarray(x, jnp.float32), jnp.bfloat16))
    assert 1e-3 < np.sqrt(np.mean((low - wanted) ** 2) / np.mean(wanted**2)) < 0.1


def test_no_gradient_no_update():
    """An expert without tokens: zeros, not nan."""
    np.testing.assert_array_equal(orthogonal(jnp.zeros((2, 4, 8))), 0.0)


def test_one_matrix_is_optax():
    """On a single matrix, where optax's Muon applies, two steps are the same."""
    ours = scale_by_muon(momentum=0.95, update_rms=0.2, splits={}, axes={}, compute_dtype="float32", moment_dtype="float32")
    theirs = optax.contrib.scale_by_muon(nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers())
    params = jnp.zeros((12, 20))
    states = ours.init({"kernel": params}), theirs.init(params)
    for seed in range(2):
        g = jax.random.normal(jax.random.key(seed), params.shape)
        (found, a), (wanted, b) = ours.update({"kernel": g}, states[0]), theirs.update(g, states[1])
        states = a, b
        np.testing.assert_allclose(found["kernel"], 0.2 * 20**0.5 * wanted, atol=1e-5)


def columns(name: str) -> tuple[int, ...] | None:
    """Widths of the matrices within a kernel of STACKED, written down by hand; None for a parameter that Adam takes."""
    parent, leaf = name.split(".")[-2:]
    if leaf not in ("kernel", "w1", "w2", "w3") or parent.endswith("conv1d") or parent == "lm_head":
        return None
    is_mla = name.split(".")[2] == "1"
    return {"q_proj": (16 + 8,) if is_mla else (16,), "k_proj": (16,), "v_proj": (16,), "kv_b_proj": (16, 16)}.get(parent, ())


def test_what_is_a_matrix():
    """R171: heads, experts and stacked layers are matrices of their own; conv, norms, gates, embeddings and head go to Adam. Two steps."""
    optimizer = make_optimizer(OptimConfig(algorithm="muon", clip_norm=1e9, weight_decay=0.0), STACKED)
    shapes = jax.eval_shape(lambda: initial_state(STACKED, optimizer, 0)).params
    rng = np.random.default_rng(0)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), shapes) for _ in range(2)]
    state, update = optimizer.init(grads[0]), jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(g, state, g)
    one, two = (flatten(g) for g in grads)
    muon, adam = set(), set()
    for name, found in flatten(updates).items():
        g1, g2, widths = np.float64(one[name]), np.float64(two[name]), columns(name)
        if widths is None:
            mean, squares = (0.1 * 0.9 * g1 + 0.1 * g2) / (1 - 0.9**2), (0.05 * 0.95 * g1**2 + 0.05 * g2**2) / (1 - 0.95**2)
            wanted = mean / (np.sqrt(squares) + 1e-8)
            adam.add(name.rpartition(".")[0].rpartition(".")[2])
        else:
            m = 0.95 * g1 + g2
            pattern = widths or m.shape[-1:]
            edges = np.cumsum(pattern * (m.shape[-1] // sum(pattern)))[:-1]
            wanted = np.empty_like(m)
            for index in np.ndindex(m.shape[:-2]):
                wanted[index] = np.concatenate([muon_update(block) for block in np.split(m[index], edges, axis=-1)], axis=-1)
            assert 0.14 < np.sqrt(np.mean(wanted**2)) < 0.24, name
            muon.add(name.rpartition(".")[0].rpartition(".")[2])
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=name)
    assert {"q_proj", "kv_b_proj", "experts", "gate", "o_proj", "f_a_proj"} <= muon
    assert {"q_conv1d", "lm_head", "embed_tokens", "o_norm", "self_attn", "kv_a_layernorm"} <= adam


def test_updates_on_a_mesh():
    """R161: on eight devices, parameters and momentum in parts, the update of one device."""
    optimizer = make_optimizer(OptimConfig(algorithm="muon"), STACKED)
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: initial_state(STACKED, optimizer, 0))
    grads = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), abstract.params)
    wanted, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2), jax.devices())
    placed = state_shardings(shapes(STACKED), abstract, mesh)
    with jax.set_mesh(mesh):
        parts = jax.device_put(grads, placed.params)
        state = jax.jit(optimizer.init, out_shardings=placed.opt_state)(parts)
        found, after = jax.jit(optimizer.update, out_shardings=(placed.params, placed.opt_state))(parts, state, parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)
    specs = {
        name: x.sharding.spec for name, x in flatten(after).items() if name.endswith("w1") or name.endswith("0.self_attn.q_proj.kernel")
    }
    assert all("fsdp" in str(spec) for spec in specs.values())
    assert len(specs) == 3


@pytest.mark.parametrize(
    ("experts", "mesh", "moved"),
    [
        (8, MeshConfig(fsdp=4, expert=2), 8),
        (6, MeshConfig(fsdp=4, expert=2), 8),  # three for each of two owners, shared out among four devices as if they were four
        (10, MeshConfig(fsdp=4, expert=2), 16),
        (5, MeshConfig(fsdp=4, expert=2), 8),
        (6, MeshConfig(fsdp=2, context=2, expert=2), 8),
        (3, MeshConfig(fsdp=4, context=2), 8),  # four would do, but each twice
    ],
)
def test_experts_travel_twice(experts, mesh, moved):
    """To the devices that make them orthogonal and, as updates, back: parameters and momentum stay, and no matrix is split."""
    muon = scale_by_muon(
        momentum=0.95,
        update_rms=0.2,
        splits={},
        axes={"periods.w1": ("experts", "embed", "mlp")},
        compute_dtype="float32",
        moment_dtype="float32",
    )
    mesh, shape = make_mesh(mesh), (2, experts, 64, 32)
    placed = parameter_sharding(mesh, ("experts", "embed", "mlp"), shape)
    params = {"periods": {"w1": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)}}

    def apply(params, grads, state):
        updates, state = muon.update(grads, state)
        return jax.tree.map(lambda p, u: p - 0.1 * (u + 0.01 * p), params, updates), state

    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), (params, params, MuonState(params)))
    wanted = jax.jit(apply)(*values)
    with jax.set_mesh(mesh):
        compiled = jax.jit(apply, out_shardings=placed).lower(params, params, MuonState(params)).compile()
        updated = compiled(*jax.device_put(values, placed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), updated, wanted)
    found = collectives(compiled.as_text())
    assert bytes_by_kind(found) == {"all-to-all": 2 * 2 * moved // 8 * 64 * 32 * 4}, bytes_by_source(found)


def test_heads_of_other_models():
    """GPT-2's q, k, v lie in one kernel of three times H heads; Mamba-2's projection is five matrices."""
    found = make_optimizer(OptimConfig(algorithm="muon"), GPT2).init(jax.tree.map(jnp.zeros_like, make_step(run_config("x"))[0].params))
    assert any(name.endswith("c_attn.kernel") for name in flatten(found) if "momentum" in name)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_moments_in_chosen_dtypes(algorithm):
    """R174: float32 unless asked for otherwise; bfloat16 changes what is stored, not the first update, and the table says so."""
    low = OptimConfig(algorithm=algorithm, first_moment_dtype="bfloat16", second_moment_dtype="bfloat16")
    optimizers = [make_optimizer(o, HYBRID) for o in (OptimConfig(algorithm=algorithm), low)]
    states = [jax.eval_shape(lambda o=o: initial_state(HYBRID, o, 0)) for o in optimizers]
    for state, dtype in zip(states, ("float32", "bfloat16"), strict=True):
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert {str(x.dtype) for x in moments} == {dtype}
        assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float32"}
        rows = [line for line in dtype_table(state, "float32").splitlines() if line.startswith(("Adam", "Muon"))]
        assert len(rows) == (3 if algorithm == "muon" else 2)
        assert all(dtype in row for row in rows)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), {"norm": states[0].params["norm"]})
    updates = [o.update(grads, o.init(grads), grads)[0] for o in optimizers]
    np.testing.assert_allclose(*(u["norm"]["scale"] for u in updates), rtol=1e-6)


def test_more_names_without_decay():
    optimizer = make_optimizer(OptimConfig(weight_decay=0.5, no_decay=("embed_tokens",)), HYBRID)
    params = {"embed_tokens": {"embedding": jnp.ones((2, 2))}, "lm_head": {"kernel": jnp.ones((2, 2))}}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert {name: float(u.max()) for name, u in flatten(updates).items()} == {"embed_tokens.embedding": 0.0, "lm_head.kernel": 0.5}


def muon_run(model):
    config = run_config("no text", model, steps=30, batch_size=8)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, algorithm="muon", qk_clip=0.05))


def test_clip_brings_the_logits_down_and_leaves_the_others():
    """Kimi K2, algorithm 1: heads above the threshold come down to exactly it, the others keep every bit."""
    state, _ = make_step(muon_run(STACKED))
    graphdef, tokens = structure(STACKED), random_batch(2).tokens[:, :-1]
    logits = jax.jit(lambda params: merge(graphdef, params, state.buffers)(tokens).aux["max_logits"])
    before = np.asarray(logits(state.params))
    assert before.shape == (2, 4)
    threshold = float(np.sort(before[0])[1] + np.sort(before[0])[2]) / 2  # two heads of the first MLA layer are above it
    clipped = clip_query_keys(state.params, jnp.asarray(before), threshold)
    after = np.asarray(logits(clipped))
    np.testing.assert_allclose(after[0], np.minimum(before[0], threshold), rtol=1e-5)
    gamma = np.minimum(1, threshold / before)[..., None]
    own, shared = np.sqrt(gamma).repeat(16, -1), gamma.repeat(8, -1)
    factors = {"q_proj": np.concatenate([own, shared], -1), "kv_b_proj": np.concatenate([own, np.ones((2, 4, 16))], -1)}
    new = flatten(clipped)
    for name, old in flatten(state.params).items():
        factor = factors.get(name.split(".")[-2], np.ones(())) if ".1.self_attn." in name else np.ones(())
        factor = np.broadcast_to(factor.reshape(2, 1, -1) if factor.ndim else factor, old.shape)
        np.testing.assert_allclose(new[name], old * factor, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(np.asarray(new[name])[factor == 1], np.asarray(old)[factor == 1])


def test_step_with_muon_and_clip(tmp_path):
    """R173: the whole step learns, its state survives a checkpoint."""
    state, step = make_step(muon_run(HYBRID))
    batch, losses = random_batch(8), []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        assert 0 < float(metrics.max_logit) < 10
    assert losses[-1] < 0.8 * losses[0]
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1, on_failure="stop", say=print)
    checkpoints.save(state, {"step": 12, "config": {}}, None)
    checkpoints.close()
    restored = checkpoints.restore(jax.eval_shape(lambda: state), lambda meta: None).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_largest_logits_of_parts_are_maxima():
    one, two = (Sums(jnp.float32(n), jnp.int32(1), jnp.array([[n]]), jnp.array([[-2.0, n]])) for n in (1, 3))
    np.testing.assert_array_equal(one.plus(two).max_logits, [[-2.0, 3.0]])
    assert [int(x) for x in (one.plus(two).nats, one.plus(two).tokens, one.plus(two).expert_counts[0, 0])] == [4, 2, 4]


def test_clip_needs_mla(tmp_path):
    config = run_config(tmp_path)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, qk_clip=100.0))
    with pytest.raises(UserError, match=r"optim\.qk_clip is for multi-head latent attention, which a gpt2 model has not"):
        loop.train(config, tmp_path / "run")


def test_logits_are_reported_without_a_cache_only():
    model = jax.eval_shape(lambda: models.build(HYBRID, nnx.Rngs(0)))
    assert "max_logits" in jax.eval_shape(lambda m: m(jnp.zeros((1, 3), jnp.int32)), model).aux
    cached = jax.eval_shape(lambda m: m(jnp.zeros((1, 3), jnp.int32), cache=m.init_cache(1, 4)), model)
    assert "max_logits" not in cached.aux
