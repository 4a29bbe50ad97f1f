"""Cycles of the TPU kernels, read from their compiled schedule, stay within their budgets; and how they are read."""

import importlib.util
import json
import pathlib
import shlex
import subprocess
from types import SimpleNamespace

import jax
import pytest
import tyro

from kda_jax import cli, ops
from kda_jax.bench import bundles, tpu_peers, tpu_search, tpu_static
from kda_jax.errors import UserError
from pallas_kernels.tpu import tiles

BUDGETS = {
    b["command"]: b for b in json.loads((pathlib.Path(tpu_static.__file__).parents[2] / "pallas_kernels/tuned/budgets.json").read_text())
}
REGRESSION = 1.05
NESTED = """
LH: loop header
     0   :  { %s0 = inlined_call_operand.hbm [shape: bf16[1,2048,16,128]] }
   0x1   :  { %s1 = smov 0 }
   0x2 LB: > { %s2 = sphi %s1, %s9  ;;  %v1 = vld [vmem:[#allocation1] sm:$0xff] }
   0x3   : > { %s3 = smov 0
     /* a comment in the middle of a bundle */ }
   0x4 LB: > > { %v2 = vadd.f32 %v1, %v1 }
   0x5 PF: > > { %v3 = vmul.f32 %v2, %v2  ;;  %p1 = scmp.ge.s32.totalorder %s4, 5 /* loop exit test */ }
   0x6 LB: >> { %v4 = vsub.f32 %v3, %v3 }
   0x7   : >> { %p2 = scmp.ge.s32.totalorder %s5, 7 /* loop exit test */ }
   0x8   : >> { vst [vmem:[#allocation2] sm:$0xff] %v4 }
   0x9   : > { %p3 = scmp.ge.s32.totalorder %s9, 11 /* loop exit test */ }
   0xa   :  {}
   0xb   :  { %19 = vsyncpa [#allocation3], 1 }
"""


def options(command: str) -> tpu_static.StaticOptions:
    return tyro.cli(tpu_static.StaticOptions, args=shlex.split(command)[2:])


def test_bundles_are_weighted_by_the_trips_of_all_loops_around_them():
    """Three bundles of the outer loop, two of an inner loop of 5 trips and three of its sibling of 7."""
    assert bundles.issue_cycles(NESTED.splitlines()) == (11 * (3 + 5 * 2 + 7 * 3), 8, 0)


def test_a_loop_of_unknown_length_is_reported():
    text = NESTED.replace("%s5, 7", "%s5, %s6")
    assert bundles.issue_cycles(text.splitlines()) == (11 * (3 + 5 * 2 + 3), 8, 1)


def test_a_kernel_without_a_loop_is_counted():
    assert bundles.issue_cycles(line for line in NESTED.splitlines() if ">" not in line) == (4, 4, 0)


def test_slots_in_use():
    text = "== CAPACTIY:\nMXU, VALU, VLOAD:FILL, VSTORE:SPILL\n    2     4     3     1\n== UTILIZATION:\n1 4 0 1\n0 2 3 0\n"
    used, share = bundles.slot_use(text)
    assert used == {"MXU": 1, "VALU": 6, "VLOAD:FILL": 3, "VSTORE:SPILL": 1}
    assert share == {"MXU": 0.25, "VALU": 0.75, "VLOAD:FILL": 0.5, "VSTORE:SPILL": 0.5}


def test_budgets_cover_the_family():
    measured = {(o.tpu_static, o.lower_bound is not None, o.mode, o.target) for o in map(options, BUDGETS)}
    problems = [(op, False) for op in ops.REGISTRY] + [("kda", True)]
    assert measured == {(*problem, mode, target) for problem in problems for mode in ("fwd", "both") for target in tpu_static.TARGETS}


@pytest.mark.parametrize("target", tpu_static.TARGETS)
def test_other_targets_are_within_reach_of_v6e(target):
    """Cycles per token-head within 1.6 of those of v6e."""
    for command, budget in BUDGETS.items():
        v6e = BUDGETS[command.replace(f"--target {target}", "--target v6e")]
        if f"--target {target}" in command:
            assert budget["cycles_per_token_head"] <= 1.6 * v6e["cycles_per_token_head"], command


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='the package libtpu is not installed: pip install "jax[tpu]"')
@pytest.mark.parametrize("command", BUDGETS)
def test_within_budget(command):
    """Ten to thirty seconds each."""
    budget = BUDGETS[command]
    chosen = options(budget["command"])
    found = tpu_static.measure(chosen).cycles / chosen.token_heads
    assert found <= REGRESSION * budget["cycles_per_token_head"], f"libtpu {importlib.metadata.version('libtpu')}: {found:.2f}, {budget}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='the package libtpu is not installed: pip install "jax[tpu]"')
@pytest.mark.parametrize("target", tpu_static.TARGETS)
def test_compiles_for_every_target(target):
    """Forward and backward of the largest kernels, with the VMEM that `tiles` reckons with; HBM at T = 8192, H = 32 at most 1 GiB."""
    chosen = tpu_static.StaticOptions("kda", target=target, mode="both", tokens=8192, heads=32)
    found = tpu_static.measure(chosen)
    assert len(found.kernels) == 2
    assert found.temporary_bytes <= 2**30
    for kernel in found.kernels:
        backward = "backward" in kernel.name
        heads = tiles.choose_tile("channel", True, 32, 32, 64, 128, 128, False)[backward]
        assert kernel.vmem_bytes <= tiles.vmem_bytes("channel", heads, 64, 128, 128, False, backward)


def test_tiles():
    """Divisors of the heads in blocks of 8, whole groups; what has no such block is padded or repeated first."""
    assert tiles.legal_heads(32, 32, 16) == 16
    assert tiles.legal_heads(12, 12, 16) == 12
    assert tiles.legal_heads(24, 24, 16) == 8
    assert tiles.legal_heads(16, 32, 16) == 16
    assert tiles.whole_heads(16, 32) == (16, 32)
    assert tiles.whole_heads(4, 32) == (32, 32)
    assert tiles.whole_heads(36, 36) == (40, 40)
    assert tiles.choose_tile("bounded", True, 40, 40, 64, 128, 128, False) == (8, 8)
    with tiles.use(tiles.Tile(8, 8)):
        assert tiles.choose_tile("none", False, 32, 32, 64, 128, 128, False) == (8, 8)
    for device in tiles.TUNED.glob("*.json"):
        if device.stem in tpu_static.TARGETS:
            assert all(0 < min(tile) <= max(tile) <= tiles.MOST_HEADS for tile in tiles.table(device.stem).values())


def test_search_takes_the_smaller_program_of_equals():
    assert tpu_search.best({"8": 10.1, "16": 10.0}) == 8
    assert tpu_search.best({"8": 11.0, "16": 10.0}) == 16


def test_search_writes_the_best_and_keeps_the_rest(tmp_path, monkeypatch):
    """Into a file that holds tiles without their cycles, of which one kind is searched."""
    (tmp_path / "v6e.json").write_text(json.dumps({"heads": {"none": {"forward": 16, "backward": 16}, "channel": {"forward": 16}}}))

    def measure(problem):
        cycles = {"forward": 2.0, "backward": 20.0 - problem.heads_per_step}
        return SimpleNamespace(kernels=[SimpleNamespace(name=f"jvp_{n}_.1", cycles=c * problem.token_heads) for n, c in cycles.items()])

    monkeypatch.setattr(tpu_static, "measure", measure)
    monkeypatch.setattr(tpu_static, "_versions", lambda: {"libtpu": "1"})
    tpu_search.main(["--tpu-search", "v6e", "--kinds", "none", "--folder", str(tmp_path)])
    found = json.loads((tmp_path / "v6e.json").read_text())
    assert found["heads"] == {"none": {"forward": 8, "backward": 16}, "channel": {"forward": 16}}
    assert found["cycles_per_token_head"] == {"none": {"forward": {"8": 2.0, "16": 2.0}, "backward": {"8": 12.0, "16": 4.0}}}
    assert found["command"] == "kda-jax bench --tpu-search v6e"


@pytest.mark.parametrize("op", ops.REGISTRY)
def test_programs_lower(op):
    chosen = tpu_static.StaticOptions(op, mode="both", tokens=64, heads=8, value_heads=8)
    function, arrays, do = tpu_static.program(chosen)
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(arrays, do)
    assert exported.mlir_module().count("tpu_custom_call") >= 2
    assert [x.shape for x in exported.out_avals] == [do.shape, *(x.shape for _, x in sorted(arrays.items()))]


def test_floors_of_kda():
    """Bytes and FLOPs per token-head at K = V = 128, C = 64 and 16-bit inputs, but for the parameters of the gate."""
    for mode, size, flops in (("fwd", 1282, 163840 + 8192 / 3), ("both", 1282 + 2308, 163840 + 8192 / 3 + 327680)):
        chosen = tpu_static.StaticOptions("kda", mode=mode)
        _, arrays, do = tpu_static.program(chosen)
        assert tpu_static.least_bytes(chosen, arrays, do) / chosen.token_heads == pytest.approx(size, rel=2e-3)
        assert tpu_static.least_flops(chosen) / chosen.token_heads == pytest.approx(flops)


def test_mistakes_are_sentences(capsys, monkeypatch):
    assert cli.main(["bench", "--tpu-static", "kdaa"]) == 2
    assert "no recurrence 'kdaa'; nearest: kda" in capsys.readouterr().err
    monkeypatch.setattr(tpu_peers, "MODULES", {"tokamax": "no_such_module", "deltanet-tpu": "json"})
    assert cli.main(["bench", "--tpu-static", "kda", "--peer", "tokamax"]) == 2
    assert "a library that is not installed: pip install tokamax" in capsys.readouterr().err
    assert cli.main(["bench", "--tpu-static", "delta_rule", "--peer", "deltanet-tpu"]) == 2
    assert "deltanet-tpu is measured on kda and gated_delta_rule, not on delta_rule" in capsys.readouterr().err
    assert cli.main(["bench", "--tpu-static=delta_rule", "--lower-bound", "-5"]) == 2
    assert "delta_rule has none" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--tpu-static", "kda"]) == 2
    assert 'libtpu, which is not installed: pip install "jax[tpu]"' in capsys.readouterr().err


def test_a_failed_compilation_leaves_a_sentence_and_no_dump(monkeypatch):
    folders = []

    def fail(command, env, **_):
        folders.append(pathlib.Path(command[-2]))
        assert f"--xla_jf_dump_to={folders[0]}" in env["LIBTPU_INIT_ARGS"]
        assert "XLA_FLAGS" not in env
        (folders[0] / "1-kernel-70-final_bundles.txt").write_text(NESTED)
        return subprocess.CompletedProcess(command, 1, "", "a warning\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: vmem\n----\n")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match=r"^kda does not compile for v6e: jax\.errors\.JaxRuntimeError: RESOURCE_EXHAUSTED: vmem$"):
        tpu_static.measure(tpu_static.StaticOptions("kda"))
    assert not folders[0].exists()


def test_budgets_are_entered_once_under_their_command(tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_static, "_versions", lambda: {"jax": "1", "libtpu": "2"})
    report = tpu_static.Report("TPU", (), 2048 * 16 * 3, 1, 0, 0, 0, 0.0, 0.0, 0.0)
    path = tmp_path / "budgets.json"
    for chosen in (
        tpu_static.StaticOptions("kda", lower_bound=-5.0),
        tpu_static.StaticOptions("delta_rule"),
        tpu_static.StaticOptions("kda", lower_bound=-5.0),
    ):
        tpu_static.enter(path, chosen, report)
    delta, kda = json.loads(path.read_text())
    assert delta["command"] == "kda-jax bench --tpu-static delta_rule --target v6e --mode fwd"
    assert kda == {
        "command": "kda-jax bench --tpu-static kda --target v6e --mode fwd --lower-bound -5.0",
        "jax": "1",
        "libtpu": "2",
        "cycles_per_token_head": 3.0,
    }
    assert options(kda["command"]) == tpu_static.StaticOptions("kda", lower_bound=-5.0)
