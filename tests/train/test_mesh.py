"""Training on meshes of eight fake devices: the same losses, everything stored in parts."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from tiny import GPT2, HYBRID, random_batch, run_config, write_text

import kda_jax
from kda_jax import sharding
from kda_jax.checkpoint import load_run
from kda_jax.sharding import AXES, MeshConfig, make_mesh
from kda_jax.train import loop
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.state import initial_state, shapes, split, state_shardings
from kda_jax.train.step import make_train_step

MODEL = dataclasses.replace(HYBRID, num_experts=8)
CONFIG = run_config("no text", MODEL, batch_size=8)
STEPS = 5
LENGTHS = [33, 20, 33, 7, 33, 33, 15, 33]


@functools.cache
def functions(mesh: MeshConfig):
    """(the mesh, shardings of the state, a fresh state in its place, the step)."""
    devices = make_mesh(mesh, jax.devices()[: mesh.size])
    optimizer, model = make_optimizer(CONFIG.optim, MODEL), shapes(MODEL)
    fresh = functools.partial(initial_state, MODEL, optimizer, 0)
    placed = state_shardings(model, jax.eval_shape(fresh), devices)
    step = make_train_step(split(model)[0], optimizer, make_schedule(CONFIG.optim, 12), CONFIG, placed)
    return devices, placed, jax.jit(fresh, out_shardings=placed), step


@functools.cache
def losses(mesh: MeshConfig) -> tuple[float, ...]:
    devices, _, fresh, step = functions(mesh)
    found = []
    with jax.set_mesh(devices):
        state = fresh()
        for number in range(STEPS):
            state, metrics = step(state, sharding.put_rows(random_batch(8, seed=number, lengths=LENGTHS)))
            found.append(float(metrics.loss))
    return tuple(found)


def meshes(size: int) -> list[MeshConfig]:
    """All of `size` devices, their sizes powers of two."""
    factors = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    return [MeshConfig(*shape) for shape in factors if np.prod(shape) == size]


SPREAD = [
    MeshConfig(fsdp=8),
    MeshConfig(data=2, expert=4),
    MeshConfig(tensor=2, context=4),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(data=2, expert=2, context=2),
    MeshConfig(fsdp=2, tensor=2, context=2, axis_type="explicit"),
]


@pytest.mark.parametrize("mesh", SPREAD, ids=str)
def test_losses_of_one_device(mesh):
    """Five steps of a hybrid with experts, packed rows of unequal lengths."""
    np.testing.assert_allclose(losses(mesh), losses(MeshConfig()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [m for size in (2, 4, 8) for m in meshes(size) if m not in SPREAD], ids=str)
def test_losses_of_one_device_on_every_mesh(mesh):
    np.testing.assert_allclose(losses(mesh), losses(MeshConfig()), rtol=1e-5)


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
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(lambda model: model(tokens).logits)(model), wanted, atol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda model: model(tokens).logits)(model), wanted, atol=1e-5)
