"""Set before JAX starts: a CPU backend with eight devices, and compilation that suits programs which run once.

Subprocesses of tests inherit it, and keep what they compile for each other. What must hold for the compiler's own choices is compiled
`as_users` do.
"""

import os
import pathlib
from importlib import metadata

import pytest

FLAGS = {"xla_force_host_platform_device_count": "8", "xla_backend_optimization_level": "0"}
if metadata.version("jaxlib").startswith("0.10."):  # a flag of that version alone, which halves the time of compiling
    FLAGS["xla_cpu_use_fusion_emitters"] = "false"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "jax"))
missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in os.environ.get("XLA_FLAGS", "")]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()

MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Linux lets a process have 65,530 mapped regions. A compiled program takes ten to a thousand, and XLA crashes where it gets none."""


def pytest_configure():
    """A process of tests compiles for itself: one program is compiled once in it, and so is really compiled."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


def pytest_collection_modifyitems(items):
    """The longest files first, or one worker would end with one of them alone."""
    first = "test_notebooks.py", "test_readme.py"
    items.sort(key=lambda item: item.path.name not in first)


@pytest.fixture(scope="session")
def as_users() -> dict:
    """`compiler_options` that undo the flags above."""
    undo = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    return {name: value for name, value in undo.items() if name in FLAGS}


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forget compiled programs between test files before a process has too many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
