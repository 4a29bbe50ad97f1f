"""The five runs of the ladder differ in the model alone, and their models in size by less than five percent."""

import dataclasses
import pathlib

import pytest

from kda_jax.config import load_config_file
from kda_jax.models import count

LADDER = pathlib.Path(__file__).parents[2] / "configs" / "ladder"
NAMES = ["gpt2", "linear_attention", "deltanet", "gated_deltanet", "kimi_linear"]


@pytest.fixture(scope="module")
def runs():
    return {name: load_config_file(LADDER / f"{name}.py") for name in NAMES}


def test_one_file_per_step():
    assert sorted(path.stem for path in LADDER.glob("*.py")) == sorted([*NAMES, "base"])


def test_nothing_differs_but_the_model(runs):
    first = runs["gpt2"]
    for name, run in runs.items():
        assert run.name == f"ladder-{name}"
        assert dataclasses.replace(run, name=first.name, model=first.model) == first


def test_sizes(runs):
    sizes = {name: count(run.model).total for name, run in runs.items()}
    assert max(sizes.values()) < 1.05 * min(sizes.values()), sizes
    for name, size in sizes.items():
        assert f"{size:,} parameters" in (LADDER / f"{name}.py").read_text()
