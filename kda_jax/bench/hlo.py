"""What a compiled program sends between devices, read from its text."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b(pred|bf16|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

_CONDITION, _BODY = (re.compile(rf"\b{part}=%?([\w.\-]+)") for part in ("condition", "body"))
_OPERAND = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"\bconstant\((-?\d+)\)")
_ALONE = re.compile(r"replica_groups=(?:\{\{\d+\}|\[\d+,1\]<=)")
_NAME = re.compile(r'op_name="([^"]*)"')
_COMMON = re.compile(r"jit\((?!_)\w*\)/|\bclosed_call/|\bcheckpoint/")
"""Parts of names that say nothing."""
_SEVERAL = re.compile(r"(^|/)\(([^:]*):.*")
"""Made of several: "prefix/(first:second:third)"."""
_FILE = re.compile(r'^(\d+) "(.*\.py)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.MULTILINE)
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")


class Collective(NamedTuple):
    """One instruction of the program."""

    kind: str
    bytes: int
    """Of its result on one device."""
    times: int
    """How often it runs in one call: trip counts of the loops around it."""
    unknown_loops: int
    """Loops around it whose length is not known before they run; each counts once."""
    source: str = ""
    """The operation that it was made for, as JAX names it, and the line of that; of one made of several, the first."""


def collectives(text: str) -> list[Collective]:
    """All of a module in HLO text, as `compiled.as_text()` gives it. Asynchronous pairs count once; a conditional counts its branches.

    What is "sent" among groups of one device is left out. A sum of which each device keeps a part, which libtpu writes as a fusion of
    all-reduce and slice, is the reduce-scatter that it runs as.
    """
    computations, entry = _parse(text)
    frames, tables = _frames(text), functools.cache(lambda name: _instructions(computations.get(name, ())))
    found: list[Collective] = []

    def visit(name: str, times: int, unknown: int) -> None:
        for line in computations.get(name, ()):
            if (kind := _kind(line)) is not None:
                found.append(Collective(kind, _result_bytes(line), times, unknown, _source(line, frames)))
            elif " while(" in line:
                trips = _trips(line, tables(name), tables)
                for callee in _callees(line):
                    visit(callee, times * (trips or 1), unknown + (trips is None))
            else:
                for callee in _callees(line):
                    visit(callee, times, unknown)

    visit(entry, 1, 0)
    return found


def bytes_by_kind(found: list[Collective]) -> dict[str, int]:
    """Bytes of the results of collectives on one device in one call, by kind, largest first."""
    totals: dict[str, int] = defaultdict(int)
    for collective in found:
        totals[collective.kind] += collective.bytes * collective.times
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def bytes_by_source(found: list[Collective]) -> dict[str, int]:
    """The same by kind and source: "all-gather: jvp()/convert_element_type (params.py:37)"."""
    totals: dict[str, int] = defaultdict(int)
    for collective in found:
        totals[f"{collective.kind}: {collective.source}"] += collective.bytes * collective.times
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _parse(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if (start := _COMPUTATION.match(line)) is not None:
            current = start[1]
            computations[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            computations[current].append(line)
    return computations, entry


def _callees(line: str) -> Iterator[str]:
    yield from _CALLS.findall(line)
    for branches in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in branches.split(","))


def _kind(line: str) -> str | None:
    """Of a collective's instruction; the second half of an asynchronous pair is none."""
    instruction = _INSTRUCTION.match(line)
    if instruction is None:
        return None
    if " calls=%all-reduce-scatter" in line:
        return "reduce-scatter"
    name = instruction[2].removesuffix("-start")
    return name if name in KINDS and not _ALONE.search(line) else None


def _frames(text: str) -> dict[str, str]:
    """Each stack frame as "file.py:line", from the tables at the head of a module."""
    files = {number: path.rpartition("/")[2] for number, path in _FILE.findall(text)}
    locations = {number: f"{files.get(file, '?')}:{line}" for number, file, line in _LOCATION.findall(text)}
    return {number: locations.get(location, "?") for number, location in _FRAME.findall(text)}


def _source(line: str, frames: dict[str, str]) -> str:
    name, frame = _NAME.search(line), _FRAME_OF.search(line)
    path = "unnamed" if name is None else _SEVERAL.sub(r"\1\2", _COMMON.sub("", name[1]))
    return path if frame is None or frame[1] not in frames else f"{path} ({frames[frame[1]]})"


class _Instruction(NamedTuple):
    kind: str
    operands: list[str]
    line: str


def _instructions(lines: Iterable[str]) -> dict[str, _Instruction]:
    """Those of a computation by name, its result as "ROOT" too."""
    found = {}
    for line in lines:
        if (match := _INSTRUCTION.match(line)) is not None:
            *root, name = line.partition(" = ")[0].split()
            for known in (*root, name.lstrip("%")):
                found[known] = _Instruction(match[2], _operands(line), line)
    return found


def _operands(line: str) -> list[str]:
    return _OPERAND.findall(line[_INSTRUCTION.match(line).end() :].partition(")")[0])


def _trips(line: str, around: dict[str, _Instruction], tables: Callable[[str], dict[str, _Instruction]]) -> int | None:
    """How often a loop runs: what the compiler notes, or what `while i < stop: i += 1` says for itself; None if that is not all known.

    Args:
        line: of the loop.
        around: the instructions beside it.
        tables: those of any computation.
    """
    if (noted := _TRIPS.search(line)) is not None:
        return int(noted[1])
    condition, body = (tables(match[1]) if (match := found.search(line)) else {} for found in (_CONDITION, _BODY))
    begin, test, end = around.get(_operands(line)[0]), condition.get("ROOT"), body.get("ROOT")
    if not (begin and test and end) or not begin.kind == end.kind == "tuple" or test.kind != "compare" or "direction=LT" not in test.line:
        return None
    place, limit = (_place(condition, name) for name in test.operands)
    added = None if place is None else _original(body, end.operands[place])
    if added is None or added.kind != "add" or {_place(body, name) for name in added.operands} != {place, None}:
        return None
    start, steps = _constant(around, begin.operands[place]), [_constant(body, name) for name in added.operands]
    stop = _constant(condition, test.operands[1]) if limit is None else _constant(around, begin.operands[limit])
    return None if start is None or stop is None or 1 not in steps else max(stop - start, 0)


def _original(table: dict[str, _Instruction], name: str) -> _Instruction | None:
    """The instruction of that name, or what it copies."""
    found = table.get(name)
    while found is not None and found.kind in ("copy", "bitcast"):
        found = table.get(found.operands[0])
    return found


def _place(table: dict[str, _Instruction], name: str) -> int | None:
    """Which element of a loop's state that is; None for anything else."""
    found = _original(table, name)
    return int(_INDEX.search(found.line)[1]) if found is not None and found.kind == "get-tuple-element" else None


def _constant(table: dict[str, _Instruction], name: str) -> int | None:
    """Which integer that is; None for anything else."""
    found = _original(table, name)
    value = _INTEGER.search(found.line) if found is not None and found.kind == "constant" else None
    return value and int(value[1])


def _result_bytes(line: str) -> int:
    """Bytes of the result; of the pair (operands, results) that an asynchronous start gives, of the results."""
    instruction = _INSTRUCTION.match(line)
    shapes = [_bytes(*shape) for shape in _SHAPE.findall(instruction[1])]
    if instruction[2].endswith("-start") and instruction[1].startswith("("):
        shapes = [size for size in shapes if size > 8]  # contexts and counters besides
        half = len(shapes) // 2
        return sum(shapes[half:]) if half else sum(shapes)
    return sum(shapes)


def _bytes(dtype: str, dims: str) -> int:
    width = _BYTES.get(dtype) or int(re.search(r"\d+", dtype)[0]) / 8
    return math.ceil(width * math.prod(int(n) for n in dims.split(",") if n))
