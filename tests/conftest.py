"""Set before JAX starts: a CPU backend with eight devices, and compilation that suits programs which run once.

Subprocesses of tests inherit it all. The cache lets them, and the other workers of pytest-xdist, share what one has compiled.
"""

import os
import pathlib

FLAGS = {"xla_force_host_platform_device_count": "8", "xla_backend_optimization_level": "0"}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "jax"))
# Few entries: jaxlib 0.10.2 has crashed now and then while it wrote or read one.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "3")
missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in os.environ.get("XLA_FLAGS", "")]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()
