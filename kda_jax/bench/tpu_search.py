"""`kda-jax bench --tpu-search v6e`: the heads per grid step of every TPU kernel, from the compiled schedules of all that are legal."""

import dataclasses
import json
import pathlib
from typing import Literal

import tyro

from kda_jax.bench import tpu_static
from kda_jax.bench.tpu_static import StaticOptions

HEADS = (8, 16)
WORTH = 1.02  # a smaller program is taken when it costs at most this much more: it compiles in half the time
PROBLEMS = {
    "bounded_delta": StaticOptions("kda", lower_bound=-5.0),
    "channel_delta": StaticOptions("kda"),
    "head_delta": StaticOptions("gated_delta_rule"),
    "none_delta": StaticOptions("delta_rule"),
    "channel": StaticOptions("gated_linear_attention"),
    "none": StaticOptions("linear_attention"),
}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Compile every kernel with every number of heads per grid step and write the best into pallas_kernels/tuned. Needs libtpu, no TPU."""

    tpu_search: Literal["v5e", "v5p", "v6e", "tpu7x"]
    """Device to tune for."""
    kinds: tuple[str, ...] = tuple(PROBLEMS)
    """Kernels by kind; entries of others are kept."""
    folder: pathlib.Path = pathlib.Path("pallas_kernels/tuned")
    """Where `<device>.json` is."""


def main(args: list[str]) -> None:
    """Run `kda-jax bench` with these arguments, --tpu-search among them.

    Raises:
        UserError: libtpu is missing, or a program does not compile for the device.
    """
    options = tyro.cli(SearchOptions, args=args, prog="kda-jax bench")
    path = options.folder / f"{options.tpu_search}.json"
    record = {"heads": {}, "cycles_per_token_head": {}} | (json.loads(path.read_text()) if path.exists() else {})
    for kind in options.kinds:
        cycles = {"forward": {}, "backward": {}}
        for heads in HEADS:
            problem = dataclasses.replace(PROBLEMS[kind], target=options.tpu_search, mode="both", heads_per_step=heads)
            for kernel in tpu_static.measure(problem).kernels:
                direction = "backward" if "backward" in kernel.name else "forward"
                cycles[direction][str(heads)] = round(kernel.cycles / problem.token_heads, 2)
        record["heads"][kind] = {direction: best(found) for direction, found in cycles.items()}
        record["cycles_per_token_head"][kind] = cycles
        print(f"{options.tpu_search} {kind}: {record['heads'][kind]}, cycles per token-head {cycles}")
        record |= {"command": f"kda-jax bench --tpu-search {options.tpu_search}", **tpu_static._versions()}
        path.write_text(json.dumps(record, indent=1) + "\n")


def best(cycles: dict[str, float]) -> int:
    """The fewest heads within `WORTH` of the fewest cycles."""
    least = min(cycles.values())
    return min(int(heads) for heads, found in cycles.items() if found <= WORTH * least)
