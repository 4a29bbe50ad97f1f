"""The README's table of measured errors: `python -m kda_jax.bench.table [README.md]` prints it, or writes it into the file."""

import pathlib
import sys

import jax
import jax.numpy as jnp

from kda_jax import ops, testing

BEGIN, END = "<!-- table: ops -->", "<!-- end -->"


def rows() -> list[tuple[str, ...]]:
    """One row per op, kind of decay and implementation; kernels are interpreted where their device is not."""
    table = []
    for name, spec in ops.REGISTRY.items():
        for decay in spec.decays:
            problem = testing.make_problem(spec, jax.random.key(0), T=130, decay=decay)
            label = f"`{name}`" if len(spec.decays) == 1 else f"`{name}`, decay per {decay}"
            for implementation in ("scan", "xla", "pallas_tpu", *(("pallas_gpu",) if name == "kda" else ())):
                with testing.runnable(implementation):
                    found = testing.errors(spec, problem, implementation=implementation)
                    ratios = testing.floor_ratios(spec, problem, jnp.bfloat16, implementation=implementation)
                output = max(found[n].rms for n in ("o", "final_state"))
                gradient = max(e.rms for n, e in found.items() if n not in ("o", "final_state"))
                floor = max(ratio for _, ratio in ratios.values())
                table.append((label, f"`{implementation}`", f"{output:.1e}", f"{gradient:.1e}", f"{floor:.2f}"))
    return table


def markdown() -> str:
    """The table in Markdown."""
    head = ("op", "implementation", "float32: output", "float32: gradient", "bfloat16: error / floor")
    lines = [head, ("---", "---", "---:", "---:", "---:"), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table, or put it between its two marks in the file named on the command line."""
    if len(sys.argv) == 1:
        print(markdown())
        return
    path = pathlib.Path(sys.argv[1])
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
