"""Who may import whom, read from the source; and what importing the package may not do."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FORBIDDEN = {
    "pallas_kernels": ("flax", "kda_jax", "optax", "orbax", "os"),
    "kda_jax/ops": ("flax", "optax", "orbax", "safetensors", "os", "kda_jax.layers", "kda_jax.models", "kda_jax.train", "kda_jax.config"),
    "kda_jax/layers": (
        "pallas_kernels",
        "orbax",
        "optax",
        "safetensors",
        "os",
        "pathlib",
        "kda_jax.models",
        "kda_jax.train",
        "kda_jax.config",
    ),
    "kda_jax/models": ("pallas_kernels", "orbax", "optax", "safetensors", "kda_jax.train", "kda_jax.config", "kda_jax.checkpoint"),
    "kda_jax/hf": ("pallas_kernels", "torch", "transformers", "kda_jax.ops", "kda_jax.cli", "kda_jax.generate", "kda_jax.train.loop"),
    "kda_jax/train": ("kda_jax.layers.kimi_delta_attention", "pallas_kernels", "argparse", "tyro", "kda_jax.cli"),
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_import_edges(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            for forbidden in FORBIDDEN[folder]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{path.relative_to(ROOT)} imports {name}"


def test_sizes():
    """Files of at most 600 lines; functions of at most 60 (kernel bodies 120); at most 12 parameters in a public function."""
    for folder, limit in (("kda_jax", 60), ("pallas_kernels", 120)):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            assert source.count("\n") <= 600, path
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef):
                    documented = ast.get_docstring(node)
                    body = node.body[1:] if documented else node.body
                    lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                    assert lines <= limit, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"
                    if folder == "kda_jax" and not node.name.startswith("_"):
                        count = len([*node.args.args, *node.args.kwonlyargs])
                        assert count <= 13, f"{path.relative_to(ROOT)}: {node.name} takes {count} parameters"
                        assert node.args.kwarg is None, f"{path.relative_to(ROOT)}: {node.name} takes **{node.args.kwarg}"


def test_importing_touches_no_device():
    """R143: the package can be imported before jax.distributed.initialize; ops load no model or training code."""
    code = (
        "import sys, kda_jax, kda_jax.ops\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "heavy = [m for m in ('flax', 'optax', 'orbax', 'tyro', 'grain') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
