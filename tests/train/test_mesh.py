"""Training on meshes of eight fake devices: the same losses, everything stored in parts."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from tiny import GPT2, HYBRID, copy, random_batch, run_config, write_text

import kda_jax
from kda_jax import sharding
from kda_jax.bench.hlo import bytes_by_kind, bytes_by_source, collectives
from kda_jax.checkpoint import load_run
from kda_jax.sharding import AXES, MeshConfig, make_mesh
from kda_jax.train import loop
from kda_jax.train.data import Batch
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.state import flatten, initial_state, shapes, split, state_shardings, with_shardings
from kda_jax.train.step import make_forward, make_train_step

MODEL = dataclasses.replace(HYBRID, num_experts=8)
CONFIG = run_config("no text", MODEL, batch_size=8)
STEPS = 5
LENGTHS = [33, 20, 33, 7, 33, 33, 15, 33]


@functools.cache
def fresh():
    """A state on one device, and the shapes of its model."""
    return jax.jit(functools.partial(initial_state, MODEL, make_optimizer(CONFIG.optim, MODEL), 0))(), shapes(MODEL)


@functools.cache
def losses(mesh: MeshConfig) -> tuple[float, ...]:
    """Of the first steps, on the first devices."""
    state, model = fresh()
    devices = make_mesh(mesh, jax.devices()[: mesh.size])
    placed = state_shardings(model, state, devices)
    optimizer, schedule = make_optimizer(CONFIG.optim, MODEL), make_schedule(CONFIG.optim, 12)
    found = []
    with jax.set_mesh(devices):
        step = make_train_step(split(model)[0], optimizer, schedule, CONFIG, placed)
        state = jax.device_put(copy(state), placed)
        for number in range(STEPS):
            state, metrics = step(state, sharding.put_rows(random_batch(8, seed=number, lengths=LENGTHS)))
            found.append(float(metrics.loss))
    return tuple(found)


def meshes(size: int) -> list[MeshConfig]:
    """All of `size` devices, their sizes powers of two."""
    factors = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    return [MeshConfig(*shape) for shape in factors if np.prod(shape) == size]


SPREAD = [
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(data=2, expert=2, context=2),
    MeshConfig(fsdp=2, tensor=2, context=2, axis_type="explicit"),
]


@pytest.mark.parametrize("mesh", [pytest.param(SPREAD[0], marks=pytest.mark.slow), *SPREAD[1:]], ids=str)
def test_losses_of_one_device(mesh):
    """Five steps of a hybrid with experts on rows of unequal lengths. 25 s of processor time each: the compiler's."""
    np.testing.assert_allclose(losses(mesh), losses(MeshConfig()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [m for size in (2, 4, 8) for m in meshes(size) if m not in SPREAD], ids=str)
def test_losses_of_one_device_on_every_mesh(mesh):
    """The other 53 meshes: 25 s of processor time each."""
    np.testing.assert_allclose(losses(mesh), losses(MeshConfig()), rtol=1e-5)


@pytest.mark.slow
def test_parameters_travel_and_tokens_do_not():
    """The gradient of two layers over many tokens: but for the experts' exchange, parameters are gathered in bfloat16 for the forward and
    again for its recomputation (kept in between, they would be whole on every device), and their gradients summed once. 30 s."""
    linear = dataclasses.replace(MODEL.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,))
    config = dataclasses.replace(MODEL, num_hidden_layers=2, linear_attn_config=linear, first_k_dense_replace=0, remat="full")
    model, mesh = shapes(config), make_mesh(MeshConfig(fsdp=4, expert=2))
    graphdef, *arrays = split(model)
    placed = [state_shardings(model, tree, mesh) for tree in arrays]
    forward, rows = make_forward(graphdef, "bfloat16"), sharding.activation_sharding(mesh, ("batch",), (8,))
    tokens = jax.ShapeDtypeStruct((8, 513), "int32", sharding=rows)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda *args: forward(*args).nats), out_shardings=placed[0])
        text = gradient.lower(*map(with_shardings, arrays, placed), Batch(tokens, tokens)).compile().as_text()
    found = collectives(text)
    sent = bytes_by_kind(found)
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(arrays))
    assert weights < 8 * 512 * config.hidden_size * 4
    assert 0 < sent["all-gather"] <= 2 * weights / 2, bytes_by_source(found)
    assert 0 < sum(sent.values()) - sent["all-to-all"] - sent["all-gather"] <= weights, bytes_by_source(found)


def test_created_in_parts():
    """The program that makes a state holds an eighth of it per device and never a whole parameter; moments lie with parameters."""
    mesh, optimizer = make_mesh(MeshConfig(fsdp=8)), make_optimizer(CONFIG.optim, GPT2)
    model = dataclasses.replace(GPT2, vocab_size=4096, n_layer=1)
    make = functools.partial(initial_state, model, optimizer, 0)
    abstract = jax.eval_shape(make)
    placed = state_shardings(shapes(model), abstract, mesh)
    memory = jax.jit(make, out_shardings=placed).lower().compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    table = 4096 * GPT2.n_embd * 4
    assert memory.output_size_in_bytes < 1.1 * whole / 8
    assert memory.temp_size_in_bytes < table
    found = flatten(placed)
    moments = [name for name in found if ".mu." in name or ".nu." in name]
    assert len(moments) == 2 * len(flatten(abstract.params))
    for name in moments:
        assert found[name] == found["params" + name[name.index("u.") + 1 :]], name


def test_a_run_on_a_mesh(tmp_path):
    """From the command line's fields to a model on another mesh: the losses of one device, resumed on a second mesh, loaded on a third."""
    text, runs = write_text(tmp_path / "text"), {}
    for name, *stages in [
        ("one", (4, MeshConfig()), (6, MeshConfig())),
        ("many", (4, MeshConfig(fsdp=4, tensor=2)), (6, MeshConfig(data=4, context=2, axis_type="explicit"))),
    ]:
        for steps, mesh in stages:
            config = run_config(text, GPT2, steps=steps, batch_size=8)
            config = dataclasses.replace(config, mesh=mesh, optim=dataclasses.replace(config.optim, schedule="wsd", decay_fraction=0.0))
            loop.train(config, tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        runs[name] = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert len(runs["one"]) == 6
    np.testing.assert_allclose(runs["many"], runs["one"], rtol=1e-5)
    tokens = random_batch(2).tokens
    wanted = load_run(tmp_path / "many").model(tokens).logits
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    model = kda_jax.load(tmp_path / "many", mesh=mesh)
    assert model.h.periods[0].attn.c_attn.kernel[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    logits = jax.jit(lambda model: model(tokens).logits)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(logits(model), wanted, atol=1e-5)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-5)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4, axis_type="explicit"))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(logits(kda_jax.load(tmp_path / "many", mesh=mesh)), wanted, atol=1e-5)


def test_a_mesh_of_one_device_adds_nothing():
    """The step traces to the same program with a mesh of ones and without a mesh."""
    state, model = fresh()
    optimizer, schedule = make_optimizer(CONFIG.optim, MODEL), make_schedule(CONFIG.optim, 12)
    mesh = make_mesh(MeshConfig())
    programs = []
    for placed in (None, state_shardings(model, state, mesh)):
        step = make_train_step(split(model)[0], optimizer, schedule, CONFIG, placed)
        with jax.set_mesh(mesh) if placed is not None else contextlib.nullcontext():
            traced = step.trace(jax.eval_shape(lambda: state), random_batch(8))
        programs.append(collections.Counter(str(eqn.primitive) for eqn in equations(traced.jaxpr.jaxpr)))
    assert programs[0] == programs[1]


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)
