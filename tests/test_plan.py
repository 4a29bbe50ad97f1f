"""Planning without the pod: slices by name, collectives read from a program, and a whole plan for fake devices."""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kda_jax import ops
from kda_jax.bench import plan as planning
from kda_jax.bench.hlo import bytes_by_kind, bytes_by_source, collectives
from kda_jax.bench.slices import CHIPS, find, known
from kda_jax.cli import main
from kda_jax.config import load_config_file
from kda_jax.errors import UserError
from kda_jax.models import presets
from kda_jax.sharding import MeshConfig

RUN = """
from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import presets
from kda_jax.models.config import GPT2Config
from kda_jax.sharding import MeshConfig

config = RunConfig(
    name="planned",
    model=GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2),
    data=DataConfig(seq_len=32),
    optim=OptimConfig(algorithm="muon"),
    train=TrainConfig(batch_size=8),
    mesh=MeshConfig(fsdp=4, tensor=2),
)
"""


@pytest.mark.parametrize(
    ("name", "devices", "gigabytes"), [("v5p:4x4x4", 64, 95), ("v6e:16x16", 256, 32), ("v5e:2x3", 6, 16), ("tpu7x:2x2x1", 8, 96)]
)
def test_slices(name, devices, gigabytes):
    """Known ones and others of the form; a device is half a chip of v4 and tpu7x."""
    found = find(name)
    assert (found.devices, found.hbm_bytes) == (devices, gigabytes * 2**30)


@pytest.mark.parametrize("name", ["v9:2x2", "v5p", "v5p:4x4", "v6e:4x4x4", "v6e:ax4", "cpu:0"])
def test_unknown_slices_list_the_known(name):
    with pytest.raises(UserError, match=f"there is no slice '{name}'.*known: .*(v5p:4x4x4|v6e:16x16)"):
        find(name)
    assert all(find(name).chips for name in known())
    assert {name.partition(":")[0] for name in known()} == set(CHIPS)


def test_collectives_of_a_compiled_program():
    """A product whose sum runs over two devices, five times in a loop and once outside: what each device gets, in bytes."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", None), (None, "x")))
    whole = NamedSharding(mesh, PartitionSpec())

    def program(a, w):
        def body(a, _):
            return jax.lax.with_sharding_constraint(jnp.tanh(a @ w), columns), None

        return jax.lax.with_sharding_constraint(jax.lax.scan(body, a, None, length=5)[0], whole)

    shapes = [jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=columns), jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)]
    text = jax.jit(program, out_shardings=whole).lower(*shapes).compile().as_text()
    found = collectives(text)
    assert {c.unknown_loops for c in found} == {0}
    by_kind = bytes_by_kind(found)
    reduced = by_kind.get("all-reduce", 0) + by_kind.get("reduce-scatter", 0)
    assert reduced in (5 * 16 * 64 * 4, 5 * 16 * 32 * 4), by_kind
    assert by_kind["all-gather"] == 16 * 64 * 4


def test_collectives_of_a_tpu_program():
    """Asynchronous pairs count once, by their results; loops multiply; a loop of unknown length counts once and is said to.

    What is summed over groups of one device is not sent; each has the name and the line of what it was made for.
    """
    text = """HloModule m

FileNames
1 "/somewhere/layer.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=8 end_column=8}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %ag = (bf16[8,128]{1,0}, bf16[32,128]{1,0:T(8,128)(2,1)}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %done = bf16[32,128]{1,0} all-gather-done(%ag)
}
%cond (p: (s32[], bf16[8,128])) -> pred[] {
  %c = pred[] constant(true)
}
%outer (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %w = (s32[], bf16[8,128]) while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = f32[10]{0} all-reduce(%y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %alone = f32[10]{0} all-reduce(%y), replica_groups={{0},{1},{2},{3}}, to_apply=%add
}
ENTRY %main (a: bf16[8,128]) -> bf16[8,128] {
  %w2 = (s32[], bf16[8,128]) while(%p), condition=%cond, body=%outer
  %f = (f32[4]{0}, f32[6]{0}) all-to-all(%a, %b), dimensions={0}, metadata={op_name="jit(f)/checkpoint/(a:b)" stack_frame_id=2}
}
"""
    found = collectives(text)
    assert bytes_by_kind(found) == {"all-gather": 3 * 32 * 128 * 2, "all-reduce": 40, "all-to-all": 40}
    assert {c.kind: c.unknown_loops for c in found} == {"all-gather": 1, "all-reduce": 1, "all-to-all": 0}
    assert bytes_by_source(found)["all-to-all: a (layer.py:7)"] == bytes_by_source(found)["all-reduce: unnamed"] == 40


def test_loops_that_the_compiler_does_not_count():
    """libtpu notes no trip counts: they are read from the comparison, the increment and the beginning; from all three or not at all."""
    module = """HloModule m
%body (p: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}, f32[8]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(1)
  %copied = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%copied, %one)
  %stop = s32[]{:T(128)} get-tuple-element(%p), index=1
  %f = f32[8] get-tuple-element(%p), index=2
  %g = f32[8]{0} fusion(%f), kind=kCustom, calls=%all-reduce-scatter.3.clone, metadata={op_name="jit(step)/dot"}
  ROOT %t = (s32[]{:T(128)}, s32[]{:T(128)}, f32[8]) tuple(%next, %stop, %g)
}
%all-reduce-scatter.3.clone (x: f32[32]) -> f32[8] {
  %x = f32[32] parameter(0)
  %r = f32[32] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = f32[8] dynamic-slice(%r, %y), dynamic_slice_sizes={8}
}
%cond (p: (s32[], s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}, f32[8]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %seven = s32[] constant(7)
  %stop = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %seven), direction=LT
}
ENTRY %main (a: f32[8], n: s32[]) -> f32[8] {
  %a = f32[8] parameter(0)
  %n = s32[] parameter(1)
  %two = s32[] constant(2)
  %c = s32[]{:T(128)S(1)} copy(%two)
  %begin = (s32[], s32[], f32[8]) tuple(%c, %n, %a)
  %w = (s32[], s32[], f32[8]) while(%begin), condition=%cond, body=%body, backend_config={"flag_configs":[]}
}
"""
    assert [tuple(c) for c in collectives(module)] == [("reduce-scatter", 32, 5, 0, "dot")]
    nine = module.replace("%n = s32[] parameter(1)", "%n = s32[] constant(9)").replace("compare(%i, %seven)", "compare(%i, %stop)")
    assert [c.times for c in collectives(nine)] == [7]
    for counted, other in [
        ("compare(%i, %seven)", "compare(%i, %stop)"),
        ("direction=LT", "direction=NE"),
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)"),
        ("add(%copied, %one)", "multiply(%copied, %one)"),
        ("copy(%two)", "negate(%two)"),
    ]:
        assert [(c.times, c.unknown_loops) for c in collectives(module.replace(counted, other))] == [(1, 1)], other


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(RUN)
    return path


def test_plan_for_fake_devices(run_file, capsys, tmp_path):
    """Both steps of a small model on eight: what is stored is what the shapes say, and it is written as it is said."""
    options = ["--decode-rows", "8", "--decode-context", "64", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", "--config", str(run_file), "--topology", "cpu:8", *options]) == 0
    said = capsys.readouterr().out
    assert "train step of planned on cpu:8, fsdp 4 x tensor 2: 8 rows, 32 tokens each" in said
    assert "decode step of planned on cpu:8, fsdp 4 x tensor 2: 8 rows, 64 tokens each" in said
    assert said.count("  fits") == 2
    train, decode = json.loads((tmp_path / "plan.json").read_text())
    state = 2 * 4 * 27_000  # parameters and momentum, float32, of which each device has about an eighth
    assert state / 8 < train["argument_bytes"] < state / 3
    assert train["collective_bytes"]["all-gather"] > 0
    assert any(re.search(r"^all-(gather|reduce): .* \(\w+.py:\d+\)$", source) for source in train["collective_sources"])
    assert f"MiB     {next(iter(train['collective_sources']))}\n" in said
    assert 8 * 64 * 2 * 2 * 32 * 4 / 4 < 8 * decode["argument_bytes"]  # keys and values of two layers, heads over two
    assert train["model_flops"] > 0


def test_mesh_must_match(run_file, capsys):
    assert main(["plan", "--config", str(run_file), "--topology", "v5p:4x4x4"]) == 2
    assert "v5p:4x4x4 has 64 devices and the mesh is of 8 (fsdp 4 x tensor 2)" in capsys.readouterr().err


def test_without_libtpu(run_file, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "--config", str(run_file), "--topology", "v5e:2x4"]) == 2
    assert 'pip install "jax[tpu]"' in capsys.readouterr().err


OVERFLOWS = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 59.80G of 31.25G hbm. Exceeded",
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (59.80G) exceeds available HBM (31.25G).",
)


def test_overflow_and_advice(run_file):
    """libtpu's refusals become a plan that does not fit, and say what would help."""
    for refusal in OVERFLOWS:
        needed, hbm = planning._overflow(jax.errors.JaxRuntimeError(refusal))
        assert (round(needed / 2**30, 2), round(hbm / 2**30, 2)) == (59.8, 31.25)
    with pytest.raises(ValueError, match="other"):
        planning._overflow(ValueError("other"))
    config = load_config_file(run_file)
    found = planning.Plan("train", "v6e:2x4", "", 8, 32, needed, hbm, None, None, {}, {}, 0, 0, 1.0, 1.0, 1.0, 1.0)
    assert not found.fits
    assert "--model.remat full" in planning.advice(config, found)
    assert "DOES NOT FIT" in planning.told(config, found)
    near = dataclasses.replace(found, needed_bytes=int(0.95 * hbm), effort="quick")
    assert planning.told(config, near).endswith("fits barely: --effort full compiles the program that training would run")
    assert planning.told(config, dataclasses.replace(near, effort="full")).endswith("  fits")
    wide = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=16))
    assert "--train.micro-batches 4" in planning.advice(wide, found)
    spread = dataclasses.replace(config, mesh=MeshConfig(fsdp=2, expert=4))
    assert "--train.expert-capacity" not in planning.advice(spread, found), "a model without experts"
    sparse = dataclasses.replace(spread, model=presets.kimi_k3_tiny())
    assert "--train.expert-capacity 2" in planning.advice(sparse, found)
    limited = dataclasses.replace(sparse, train=dataclasses.replace(sparse.train, expert_capacity=2.0))
    whole = dataclasses.replace(sparse, mesh=MeshConfig(fsdp=8))
    assert not any("--train.expert-capacity" in planning.advice(other, found) for other in (limited, whole))


def test_ops_choose_for_the_slice():
    """Traced for a mesh of TPUs, a recurrence takes the TPU's kernels, on whatever machine it is traced."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]).abstract_mesh
    tpu = mesh.update(abstract_device=jax.sharding.AbstractDevice("TPU v5", num_cores=1, platform="tpu"))
    q = jax.ShapeDtypeStruct((1, 128, 4, 128), jnp.bfloat16)
    g, beta = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:3]))
    assert ops.explain("kda", q, q, q, g, beta).chosen == "xla"
    with jax.sharding.use_abstract_mesh(tpu):
        assert ops.explain("kda", q, q, q, g, beta).chosen == "pallas_tpu"
