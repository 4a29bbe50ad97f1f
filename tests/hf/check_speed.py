"""How long a checkpoint with packed experts (MXFP4) takes to load, against a plain read of its file. Not a test, for it measures:

python tests/hf/check_speed.py [EXPERTS]

With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 the arrays that JAX makes on a CPU are in large pages, as NumPy's are by themselves.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import packed

from kda_jax import hf

REPEATS = 7


def medians(functions: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Seconds of each, by the clock and of the processor; they take turns."""
    taken = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            clock, processor = time.perf_counter(), time.process_time()
            result = jax.block_until_ready(function())
            taken[name].append((time.perf_counter() - clock, time.process_time() - processor))
            del result
    return {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in taken.items()}


def main(experts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = packed(Path(folder) / "x", experts)
        file = directory / "model.safetensors"
        load = lambda dtype=None: hf.load(directory, dtype=dtype).params
        total = sum(x.nbytes for x in jax.tree.leaves(load()))  # and compiles
        rows = medians(
            {
                "plain read into fresh memory": lambda: np.fromfile(file, np.uint8),
                "as many bytes as are loaded, ones": lambda: jnp.ones(total, jnp.uint8),
                "load": load,
                "load as float32": lambda: load(jnp.float32),
            }
        )
        size = file.stat().st_size / 1e9
        print(f"{size:.2f} GB in the file, {total / 1e9:.2f} GB loaded; GB/s of the file by the clock, and per second of a processor")
        for name, (clock, processor) in rows.items():
            print(f"{name:36s} {size / clock:6.2f} {size / processor:6.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
