"""Set before JAX starts: a CPU backend with eight devices, and a compiler that spends little time on programs that run once."""

import os

FLAGS = {"xla_force_host_platform_device_count": "8", "xla_backend_optimization_level": "0"}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in os.environ.get("XLA_FLAGS", "")]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()
