"""jax and flax that do not go together give one sentence, at import and on the command line."""

import doctest
import subprocess
import sys

from kda_jax import versions

PRETEND = (
    "import importlib.metadata as m, sys\n"
    "real = m.version\n"
    "m.version = lambda name: {'jax': '0.12.0', 'flax': '0.12.8'}.get(name) or real(name)\n"
)


def run(code):
    return subprocess.run([sys.executable, "-c", PRETEND + code], capture_output=True, text=True)


def test_examples():
    assert doctest.testmod(versions).failed == 0
    assert versions.problem() is None


def test_import_gives_a_sentence():
    found = run("import kda_jax.layers")
    assert found.returncode == 1
    assert found.stderr.strip().splitlines()[-1].startswith("ImportError: flax 0.12.8 does not import with jax 0.12.0: install")


def test_command_line_gives_a_sentence():
    found = run("from kda_jax.cli import main; sys.exit(main(['explain', 'kda']))")
    assert found.returncode == 2
    assert "flax 0.12.8 does not import with jax 0.12.0" in found.stderr
    assert "Traceback" not in found.stderr
