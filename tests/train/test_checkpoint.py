"""Checkpoints: what comes back, on which mesh, what is kept, and what happens to damaged ones."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import GPT2, run_config

from kda_jax.checkpoint import Checkpoints, fingerprints, load, load_run, read_arrays, step_directories
from kda_jax.config import to_dict
from kda_jax.errors import TrainingStopped, UserError
from kda_jax.layers.params import cast
from kda_jax.sharding import MeshConfig, make_mesh
from kda_jax.train.state import TrainState, flatten, initial_state, split, unflatten

META = {"step": 0, "config": {}}


def make_state(step: int, seed: int = 0) -> TrainState:
    """A state with more than ten listed layers, several dtypes, and Adam's moments."""
    keys = jax.random.split(jax.random.key(seed + step), 12)
    params = {"layers": {i: {"kernel": jax.random.normal(k, (8, 16))} for i, k in enumerate(keys)}, "half": jnp.ones((8,), jnp.bfloat16)}
    buffers = {"gate": {"e_score_correction_bias": jnp.full((8,), 0.1234567)}}
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam()).init(params)
    return TrainState(params, buffers, opt_state, jnp.asarray(step, jnp.int32))


def shapes(state: TrainState) -> TrainState:
    return jax.eval_shape(lambda: state)


class Run:
    """A run directory with its messages."""

    def __init__(self, path: Path, keep: int = 3, on_failure: str = "stop"):
        self.path, self.said = path, []
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(path, keep=keep, on_failure=on_failure, say=self.said.append)

    def save(self, *steps: int, bits: dict[int, float] | None = None) -> "Run":
        for step in steps:
            self.checkpoints.save(make_state(step), META | {"step": step}, (bits or {}).get(step))
        self.checkpoints.close()
        return self

    def restore(self, target: TrainState | None = None):
        return self.checkpoints.restore(shapes(make_state(0)) if target is None else target, lambda meta: None)


def assert_equal(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def largest_file(directory: Path) -> Path:
    """Of array data: metadata that says what the reader knows already can be lost without harm."""
    return max((p for p in directory.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_round_trip(tmp_path):
    """R133 R079: structure, order, dtypes and bits of a state with twelve listed layers; the router's bias keeps its last digits."""
    restored = Run(tmp_path).save(3).restore()
    assert_equal(restored.state, make_state(3))
    assert restored.meta["step"] == 3


def test_arrays_are_written_uncompressed(tmp_path):
    """Which takes a ninth of the time, and trained numbers would hardly shrink; what Orbax compresses unless told is read as well."""
    run, state = Run(tmp_path), make_state(3)
    state.params["constant"] = jnp.ones(2**18)
    run.checkpoints.save(state, META | {"step": 3}, None)
    run.checkpoints.close()
    assert sum(p.stat().st_size for p in (tmp_path / "checkpoints" / "3" / "model").rglob("d/*")) > 2**20
    assert_equal(run.restore(shapes(state)).state, state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as compressing:
        item = {"x": jnp.arange(2**18)}
        compressing.save(tmp_path / "compressed" / "model", args=ocp.args.PyTreeSave(item))
    found = read_arrays(tmp_path / "compressed", "model", shapes(item), fingerprints(item))
    assert_equal(found, item)


def test_names_are_dotted_paths():
    state = make_state(0)
    names = flatten(state.params)
    assert "layers.11.kernel" in names
    assert_equal(unflatten(state.params, names), state.params)


@pytest.mark.parametrize("mesh_shape", [(4, 2), (2, 1), (1, 1), (8, 1)])
@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
def test_restores_onto_any_mesh(tmp_path, mesh_shape, ambient):
    """R127 R129: saved on 4 x 2, restored on other meshes, inside and outside a mesh context, bit for bit."""
    run = Run(tmp_path)
    run.checkpoints.save(on_mesh(make_state(5), (4, 2)), META | {"step": 5}, None)
    run.checkpoints.close()
    target = on_mesh(make_state(0), mesh_shape)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
    if ambient:
        with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])):
            restored = run.restore(target)
    else:
        restored = run.restore(target)
    assert_equal(restored.state, make_state(5))
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(lambda x: x.sharding, target)


def on_mesh(state: TrainState, shape: tuple[int, int]) -> TrainState:
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)
    spec = lambda x: PartitionSpec("data", "tensor") if x.ndim == 2 else PartitionSpec()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), state)


def test_fingerprint_does_not_depend_on_the_mesh():
    state = make_state(1)
    assert fingerprints(flatten(state.params)) == fingerprints(flatten(on_mesh(state, (4, 2)).params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_fingerprint_by_numpy_and_by_xla(dtype):
    """The one is for arrays on one CPU, in blocks, the other for all others."""
    words = np.random.default_rng(0).integers(0, 256, (6, 100, 300, jnp.dtype(dtype).itemsize), np.uint8)
    x = words.view(jnp.dtype(dtype))[..., 0]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    parted = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    assert fingerprints({"x": jnp.asarray(x)}) == fingerprints({"x": parted})
    assert fingerprints({"x": jnp.asarray(x[::-1])}) != fingerprints({"x": parted})


def test_keeps_the_newest_and_the_best(tmp_path):
    """R132: old ones go only after the new one is there; the best evaluated one stays."""
    run = Run(tmp_path, keep=2).save(*range(1, 7), bits={2: 1.5, 4: 1.2, 5: 1.3})
    assert [p.name for p in step_directories(run.path)] == ["6", "5", "4"]


def flip_a_bit(directory: Path) -> None:
    path = largest_file(directory / "model")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_a_file(directory: Path) -> None:
    path = largest_file(directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_an_item(directory: Path) -> None:
    shutil.rmtree(directory / "optimizer")


def lose_the_meta(directory: Path) -> None:
    shutil.rmtree(directory / "meta")


def garble_the_meta(directory: Path) -> None:
    (directory / "meta" / "metadata").write_text("{")


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


@pytest.mark.parametrize("damage", [flip_a_bit, cut_a_file, lose_an_item, lose_the_meta, garble_the_meta, empty], ids=lambda f: f.__name__)
def test_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    """R132: the one before is used, the damaged one is moved out of the way, and its step can be saved again."""
    Run(tmp_path).save(1, 2)
    damage(tmp_path / "checkpoints" / "2")
    run = Run(tmp_path)
    restored = run.restore()
    assert_equal(restored.state, make_state(1))
    assert len(run.said) == 1
    assert run.said[0].startswith(f"skipping damaged checkpoint {tmp_path / 'checkpoints' / '2'}: ")
    assert (tmp_path / "checkpoints" / "2.damaged").is_dir()
    run.save(2)
    assert_equal(Run(tmp_path).restore().state, make_state(2))


def test_nothing_left_but_damaged_ones(tmp_path):
    Run(tmp_path).save(1)
    cut_a_file(tmp_path / "checkpoints" / "1")
    run = Run(tmp_path)
    assert run.restore() is None
    assert len(run.said) == 1


def test_leftover_of_a_crash(tmp_path):
    """R136: a temporary directory of step 2 is named, and step 2 can be saved."""
    Run(tmp_path).save(1)
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (leftover / "model").mkdir(parents=True)
    run = Run(tmp_path)
    assert int(run.restore().state.step) == 1
    assert run.said == [f"skipping half-written checkpoint {leftover}"]
    run.save(2)
    assert int(Run(tmp_path).restore().state.step) == 2


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_failed_write_is_reported(tmp_path, on_failure):
    """R130: a checkpoint that cannot be written stops the run at the latest by the next call, or is said and tried again."""
    run = Run(tmp_path, on_failure=on_failure).save(1)
    run.checkpoints.save(make_state(2), META | {"step": 2}, None)
    run.checkpoints.close()
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("not a directory any more")
    if on_failure == "stop":
        with pytest.raises(TrainingStopped, match="could not be written"):
            run.save(3)
    else:
        run.save(3)
        assert any("could not be written" in line and "going on" in line for line in run.said)


def test_check_is_called_before_arrays_are_read(tmp_path):
    Run(tmp_path).save(1)

    def refuse(meta: dict) -> None:
        raise UserError(f"step {meta['step']} is not wanted")

    with pytest.raises(UserError, match="step 1 is not wanted"):
        Run(tmp_path).checkpoints.restore(shapes(make_state(0)), refuse)
    assert (tmp_path / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "no checkpoint"])
def test_load_wants_a_run_directory(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
    if kind == "no checkpoint":
        (path / "checkpoints").mkdir()
        (path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="no complete checkpoint" if kind == "no checkpoint" else "is not a run directory"):
        load_run(path)


def test_damaged_on_one_mesh_skipped_on_another(tmp_path):
    """R127 R132: a shard that cannot be read, or has changed, is noticed on whatever mesh the checkpoint is read."""
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.checkpoints.save(on_mesh(make_state(step), (4, 2)), META | {"step": step}, None)
    run.checkpoints.close()
    cut_a_file(tmp_path / "checkpoints" / "3")
    flip_a_bit(tmp_path / "checkpoints" / "2")
    target = on_mesh(make_state(0), (2, 4))
    restored = run.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target))
    assert_equal(restored.state, make_state(1))
    assert [line.partition(":")[0].rpartition("/")[2] for line in run.said] == ["3", "2"]


@pytest.mark.parametrize("mesh", [None, MeshConfig(fsdp=4, tensor=2), MeshConfig(fsdp=2, context=2)], ids=str)
def test_loads_in_another_dtype_on_any_mesh(tmp_path, mesh):
    """The float32 masters, or on request the same rounded once, bit for bit on every mesh."""
    config = run_config(tmp_path, GPT2)
    state = jax.jit(lambda: initial_state(GPT2, optax.identity(), 0))()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path, keep=1, on_failure="stop", say=print)
    checkpoints.save(state, {"step": 0, "config": to_dict(config)}, None)
    checkpoints.close()
    devices = None if mesh is None else make_mesh(mesh, jax.devices()[: mesh.size])
    for dtype in (None, jnp.bfloat16):
        _, params, _ = split(load(tmp_path, dtype=dtype, mesh=devices))
        assert_equal(params, state.params if dtype is None else cast(state.params, dtype))
        if mesh is not None:
            assert len(params["wte"]["embedding"].sharding.device_set) == mesh.size
