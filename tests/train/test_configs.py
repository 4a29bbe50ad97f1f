"""The runs in configs/: each loads, describes a model, and says how it is run."""

import ast
import re
from pathlib import Path

import pytest

from kda_jax import models
from kda_jax.config import load_config_file

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.py") if p.name != "base.py")


@pytest.mark.parametrize("name", RUNS)
def test_run_file(name):
    config = load_config_file(CONFIGS / name)
    docstring = ast.get_docstring(ast.parse((CONFIGS / name).read_text()))
    assert re.search(rf"    kda-jax (train|bench --meshes .+) --config configs/{re.escape(name)}", docstring)
    assert models.count(config.model).total > 0
