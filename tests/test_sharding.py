"""Logical names to mesh axes: the table, what does not divide, and the sentences."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kda_jax import sharding
from kda_jax.errors import UserError
from kda_jax.models import presets
from kda_jax.models.placement import axes
from kda_jax.sharding import AXES, MeshConfig, constrain, make_mesh, parameter_sharding
from kda_jax.train.state import flatten, shapes, split

ROOT = pathlib.Path(__file__).parents[1]


def spec(mesh, names, shape):
    return parameter_sharding(mesh, names, shape).spec


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("embed", "heads"), (32, 64), P(("fsdp", "context"), ("tensor",))),
        (("embed", "heads"), (6, 48), P(("fsdp",), ("tensor",))),  # 6 = 2 x 3: fsdp splits it, context cannot
        (("embed", "vocab"), (32, 257), P(("fsdp", "context"), None)),  # an odd vocabulary stays whole
        (("embed", "heads"), (32, 3), P(("fsdp", "context"), None)),  # so do three heads
        (("experts", "embed", "mlp"), (4, 32, 16), P(None, ("fsdp", "context"), ("tensor",))),
        (("embed", "heads"), (5, 32, 64), P(None, ("fsdp", "context"), ("tensor",))),  # R161: stacked layers
        (("embed",), (32,), P(None)),  # a vector over the width is copied
        (("heads",), (5, 32), P(None, ("tensor",))),
        ((None,), (32,), P(None)),
    ],
)
def test_parameter_specs(names, shape, expected):
    assert spec(make_mesh(MeshConfig(fsdp=2, tensor=2, context=2)), names, shape) == expected


def test_experts_that_do_not_divide_are_stored_by_width():
    mesh = make_mesh(MeshConfig(expert=4, fsdp=2))
    assert spec(mesh, ("experts", "embed", "mlp"), (8, 32, 16)) == P(("expert",), ("fsdp",), None)
    assert spec(mesh, ("experts", "embed", "mlp"), (6, 32, 16)) == P(None, ("fsdp", "expert"), None)


def test_what_stays_whole_is_reported():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    found = sharding.parameter_report(
        mesh, {"lm_head.kernel": (("embed", "vocab"), (32, 50257)), "q.kernel": (("embed", "heads"), (32, 64))}
    )
    assert found == ["lm_head.kernel: vocab 50257 is not a multiple of mesh.tensor 4 and stays whole over it"]


@pytest.mark.parametrize("config", [presets.tiny_hybrid(), presets.gpt2_124m(), presets.kimi_linear_48b_a3b()], ids=lambda c: c.model_type)
def test_every_parameter_has_names(config):
    model = shapes(config)
    names = axes(model)
    found = {path: leaf for tree in split(model)[1:] for path, leaf in flatten(tree).items()}
    assert names.keys() == found.keys()
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    for path, leaf in found.items():
        assert len(spec(mesh, names[path], leaf.shape)) == leaf.ndim, path


def test_constrain():
    x = jnp.zeros((4, 6, 8))
    assert constrain(x, "batch", "time", "embed") is x
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        assert constrain(x, "batch", "time", "embed") is x
    for axis_type in ("auto", "explicit"):
        with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4, axis_type=axis_type))):
            assert jax.jit(lambda x: constrain(x, "batch", "time", "heads"))(x).sharding.spec == P("fsdp", None, "tensor")
            with pytest.raises(ValueError, match="no rule for the logical axis name 'head'; nearest: heads"):
                constrain(x, "batch", "time", "head")


def test_evened_for_the_devices_that_are_left():
    """Three experts of each of four owners become four for two devices; six that no owner has a part of become eight for all eight."""
    assert sharding.evened("matrices", 6, beside=("experts", 1)) == 6
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, expert=4))):
        assert sharding.evened("matrices", 3, beside=("experts", 4)) == 4
        assert sharding.evened("matrices", 6, beside=("experts", 1)) == 8


def test_sentences():
    with pytest.raises(UserError, match=r"mesh.data 1 x mesh.fsdp 3 .* makes 3 devices, and there are 8"):
        make_mesh(MeshConfig(fsdp=3))
    with pytest.raises(ValueError, match=r"mesh.tensor must be at least 1, got 0"):
        MeshConfig(tensor=0)


def test_only_sharding_knows_the_axes():
    """No mesh axis is named in layers, ops, models or train: they speak of batch, time, heads."""
    for folder in ("layers", "ops", "models", "train"):
        for path in sorted((ROOT / "kda_jax" / folder).rglob("*.py")):
            strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not strings & set(AXES), path
