"""Every notebook runs from top to bottom at a small size, and each asserts what it claims."""

import os
import pathlib
import re
import subprocess
import sys

import jupytext
import pytest

ROOT = pathlib.Path(__file__).parents[1]
SMALL = {
    "01_memory_ladder": {},
    "05_experts_on_a_mesh": {},
    "07_plan_a_pod": {
        "model": "__import__('kda_jax').models.config.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2)",
        "topology": "'cpu:8'",
        "rows, seq_len": "8, 32",
        "meshes": "[MeshConfig(data=8), MeshConfig(fsdp=8)]",
    },
    "03_train_tiny": {
        "model": "__import__('dataclasses').replace(presets.tiny_hybrid(), vocab_size=256)",
        "steps, batch_size, seq_len": "12, 4, 64",
        "new_tokens": "8",
    },
    "04_hybrid_cache": {"contexts": "256, 16384", "layers, width, repeats": "2, 64, 8"},
    "06_import_checkpoint": {},
}


def test_every_notebook_is_tested():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.py")} == set(SMALL)


SLOW = {"04_hybrid_cache"}  # compiles a decoding program for every length of context, 100 s


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SMALL])
def test_notebook(name, tmp_path):
    """The code cells as one program, in a process of their own, with the parameters replaced."""
    notebook = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for variable, value in SMALL[name].items():
        code, count = re.subn(rf"(?m)^{re.escape(variable)} = .*$", f"{variable} = {value}", code)
        assert count == 1, f"{name} sets {variable} {count} times"
    assert "assert " in code
    script = tmp_path / "notebook.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=os.environ | {"MPLBACKEND": "agg"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
