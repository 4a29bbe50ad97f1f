"""Reads what libtpu dumps of compiled kernels: their final VLIW bundles, how full the units' slots are, spills, VMEM.

A bundle issues in one cycle at best, so bundles times loop trip counts bound a kernel's cycles from below: DMA waits and latencies that the
schedule could not hide are not in them.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*: ?((?:> ?)*)\{")  # address, label, one > per loop around it
UNMARKED = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:LB|LH|LE|PB|PF|CT)?\s*:  \{")  # outside all loops, or empty
TRIPS = re.compile(r"%\S+, (\d+) /\* loop exit test \*/")
VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+|0)")
UTILIZATION, ALLOCATIONS = "final_hlo-static-per-bundle-utilization", "post-delay-converter"  # the dumps that hold them


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel's schedule. `slots` is the share of each unit's issue slots in use, `spills` and `fills` count instructions."""

    name: str
    cycles: int
    bundles: int
    unknown_loops: int
    slots: dict[str, float]
    spills: int
    fills: int
    vmem_bytes: int


def read_kernels(folder: pathlib.Path, hlo: str) -> Iterator[Kernel]:
    """The Pallas kernels of the compiled program among everything that was dumped."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        prefix, name = re.fullmatch(r"(\d+-(.*))-\d+-final_bundles\.txt", path.name).groups()
        if not re.search(rf'%?{re.escape(name)} = [^\n]*custom_call_target="tpu_custom_call"', hlo):
            continue
        with path.open() as lines:
            cycles, bundles, unknown = issue_cycles(lines)
        utilization, allocations = (next(folder.glob(f"{prefix}-[0-9]*-{n}.txt")).read_text() for n in (UTILIZATION, ALLOCATIONS))
        used, share = slot_use(utilization)
        vmem = max((int(size, 16) + int(offset, 16) for size, offset in VMEM.findall(allocations)), default=0)
        yield Kernel(name, cycles, bundles, unknown, share, used["VSTORE:SPILL"], used["VLOAD:FILL"], vmem)


def slot_use(text: str) -> tuple[dict[str, int], dict[str, float]]:
    """(instructions, share of the slots) by unit, from the units' names, their slots per bundle and a row for every bundle."""
    units = next(line for line in text.splitlines() if line.startswith("MXU")).replace(" ", "").split(",")
    capacity, *rows = (np.array(line.split(), int) for line in text.splitlines() if re.fullmatch(r"[\d\s]*\d\s*", line))
    used = np.sum(rows, 0)
    share = np.round(used / (capacity * len(rows)), 4)
    return dict(zip(units, used.tolist(), strict=True)), dict(zip(units, share.tolist(), strict=True))


def issue_cycles(lines: Iterable[str]) -> tuple[int, int, int]:
    """(cycles, bundles, loops of unknown length, counted once) of a kernel's final bundles.

    The grid is a loop, and the few dozen bundles outside it and empty ones inside carry no mark of depth: they are counted only
    where there is no loop.
    """
    loops, bundles, unmarked, unknown = [[0, 0, 1]], 0, 0, 0  # open loops from the outside in: depth, cycles of one trip, trips

    def close():
        nonlocal unknown
        _, cycles, trips = loops.pop()
        unknown += trips is None
        loops[-1][1] += cycles * (trips or 1)

    for line in lines:
        if bundle := BUNDLE.match(line):
            label, marks = bundle.groups()
            depth, bundles = marks.count(">") or int(label == "LB"), bundles + 1
            while loops[-1][0] > depth or (label == "LB" and loops[-1][0] == depth):
                close()
            if loops[-1][0] < depth:
                loops.append([depth, 0, None])
            loops[-1][1] += 1
        unmarked += UNMARKED.match(line) is not None
        if bundles and len(loops) > 1 and (test := TRIPS.search(line)):
            loops[-1][2] = int(test.group(1))
    while len(loops) > 1:
        close()
    return (loops[0][1], bundles, unknown) if bundles else (unmarked, unmarked, 0)
