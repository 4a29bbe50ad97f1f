"""`kda-jax bench --tpu-static OP`: what a recurrence costs on a TPU, read from its compiled schedule on a machine without one.

libtpu compiles ahead of time for a named slice. A kernel is counted by its bundles (see `bundles`), XLA's own operations by the compiler's
estimate. Kernels less than about 15% apart should not be ranked by these figures.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from kda_jax import ops
from kda_jax.bench import tpu_peers
from kda_jax.bench.bundles import Kernel, read_kernels
from kda_jax.errors import UserError, nearest
from pallas_kernels.tpu import tiles

CHUNK = 64
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Target:
    """One JAX device: the slice that libtpu knows it by, its clock (implied by the peak), HBM bytes/s and bfloat16 FLOP/s.

    Both cores of a v5p chip are one device; Mosaic gives each half of the blocks of heads, if there are two. Those of a tpu7x are two.
    """

    topology: str
    hertz: float
    bytes_per_second: float
    flops_per_second: float


TARGETS = {
    "v5e": Target("v5e:2x2", 1.5e9, 819e9, 197e12),
    "v5p": Target("v5p:2x2x1", 1.75e9, 2765e9, 459e12),
    "v6e": Target("v6e:2x2", 1.75e9, 1640e9, 918e12),
    "tpu7x": Target("tpu7x:2x2x1", 2.2e9, 7370e9 / 2, 2307e12 / 2),
}


@dataclasses.dataclass(frozen=True)
class StaticOptions:
    """Static cost of a recurrence on a TPU: from logits, with the norms, gate and sigmoid of its layer. Needs libtpu, but no TPU."""

    tpu_static: str
    """A recurrence by name."""
    target: Literal["v5e", "v5p", "v6e", "tpu7x"] = "v6e"
    mode: Literal["fwd", "both"] = "fwd"
    """fwd: the output. both: the output and the gradients of everything."""
    lower_bound: float | None = None
    """Of kda's gate, in [-5, 0). None is the unbounded gate."""
    batch: int = 1
    tokens: int = 2048
    heads: int = 16
    value_heads: int | None = None
    """Value heads; as many as heads if absent."""
    key_dim: int = 128
    value_dim: int = 128
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    peer: Literal["tokamax", "deltanet-tpu"] | None = None
    """Compile that library's kernel for the same problem, in its own layout, in place of ours. It has to be installed."""
    heads_per_step: int | None = None
    """Value heads of a grid step of the kernels; the tuned number if absent."""
    json: pathlib.Path | None = None
    """Also write the figures to this file."""
    budgets: pathlib.Path | None = None
    """Also enter the cycles per token-head, under this command, into this file of budgets."""

    @property
    def token_heads(self) -> int:
        return self.batch * self.tokens * (self.value_heads or self.heads)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says of one program."""

    device: str
    kernels: tuple[Kernel, ...]
    xla_cycles: int
    xla_ops: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    byte_floor: float
    """Cycles per token-head to move every argument and result once, in each direction of differentiation."""
    mxu_floor: float
    """Cycles per token-head of the matrix products at the peak rate, nothing recomputed."""
    compile_seconds: float

    @property
    def cycles(self) -> int:
        return sum(kernel.cycles for kernel in self.kernels) + self.xla_cycles


def main(args: list[str]) -> None:
    """Run `kda-jax bench` with these arguments, --tpu-static among them.

    Raises:
        UserError: the op is unknown, libtpu is missing, or the program does not compile for the target.
    """
    options = tyro.cli(StaticOptions, args=args, prog="kda-jax bench")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the dump goes then as well
    report = measure(options)
    _print(options, report)
    if options.json is not None:
        record = {"options": dataclasses.asdict(options) | {"json": None, "budgets": None}, **_versions(), "cycles": report.cycles}
        options.json.write_text(json.dumps(record | dataclasses.asdict(report), indent=1) + "\n")
    if options.budgets is not None:
        enter(options.budgets, options, report)


def measure(options: StaticOptions) -> Report:
    """Compile in a process of its own: libtpu reads its flags once, and may abort. Its dump, up to 1 GB, does not survive this call."""
    if options.tpu_static not in ops.REGISTRY:
        close = nearest(options.tpu_static, ops.REGISTRY)
        raise UserError(f"there is no recurrence {options.tpu_static!r}{close}; there are {', '.join(ops.REGISTRY)}")
    if options.lower_bound is not None and options.tpu_static != "kda":
        raise UserError(f"--lower-bound is of kda's gate; {options.tpu_static} has none")
    if options.peer is not None:
        program(options)  # says what is missing
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('--tpu-static compiles with libtpu, which is not installed: pip install "jax[tpu]"')
    with tempfile.TemporaryDirectory(prefix="kda_jax_llo_") as folder:
        fields = dataclasses.asdict(options) | {"json": None, "budgets": None}
        command = [sys.executable, "-m", "kda_jax.bench.tpu_static", folder, json.dumps(fields)]
        child = subprocess.run(command, env=_environment(folder), capture_output=True, text=True)
        if child.returncode:
            said = [line for line in child.stderr.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
            reason = next((line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)), said[-1])
            raise UserError(f"{options.tpu_static} does not compile for {options.target}: {reason}")
        found = json.loads(child.stdout.splitlines()[-1])
    return Report(**found | {"kernels": tuple(Kernel(**kernel) for kernel in found["kernels"])})


def _environment(folder: str) -> dict[str, str]:
    """Compile-only libtpu that dumps into `folder`, with the default flags of XLA and nothing from a cache, which would dump nothing."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags,
    }
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | own


def compile_and_read(folder: pathlib.Path, options: StaticOptions) -> Report:
    """Compile for one device of the target, in a process with the environment above, and read the dump."""
    target = TARGETS[options.target]
    device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, arrays, do = program(options)
    arguments = (arrays, do) if options.mode == "both" else (arrays,)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments)
    abstract = mesh.abstract_mesh
    if abstract.abstract_device is None:  # kernels ask it which TPU they are for
        abstract = abstract.update(abstract_device=jax.sharding.AbstractDevice(device.device_kind, num_cores=1, platform="tpu"))
    start = time.perf_counter()
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(abstract):
        compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    took, hlo, memory = time.perf_counter() - start, compiled.as_text(), compiled.memory_analysis()
    estimates = [int(cycles) for cycles in ESTIMATE.findall(hlo)]
    seconds_to_cycles = target.hertz / options.token_heads
    return Report(
        device=device.device_kind,
        kernels=tuple(read_kernels(folder, hlo)),
        xla_cycles=sum(estimates),
        xla_ops=len(estimates),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        byte_floor=least_bytes(options, arrays, do) / target.bytes_per_second * seconds_to_cycles,
        mxu_floor=least_flops(options) / target.flops_per_second * seconds_to_cycles,
        compile_seconds=took,
    )


def program(options: StaticOptions):
    """(function, its arrays by name, the output's cotangent): from what the layer's projections give to what its output norm takes."""
    dtype, HV = jnp.dtype(options.dtype), options.value_heads or options.heads
    spec, make, shape = ops.REGISTRY[options.tpu_static], jax.ShapeDtypeStruct, (options.batch, options.tokens)
    query, value = make((*shape, options.heads, options.key_dim), dtype), make((*shape, HV, options.value_dim), dtype)
    arrays = {"q": query, "k": query, "v": value}
    decay = spec.decays[-1]
    per_head = (HV, options.key_dim) if decay == "channel" else (HV,)
    if decay != "none":
        arrays["x"] = make((*shape, *per_head), dtype)
    if spec.delta:
        arrays["beta_logits"] = make((*shape, HV), dtype)
    if decay != "none" and spec.delta:
        arrays |= {"A_log": make((HV,), jnp.float32), "dt_bias": make(per_head, jnp.float32)}

    def forward(arrays):
        with tiles.use(tile):
            return recurrence(options.tpu_static, options.lower_bound, **arrays)

    if options.peer is not None:
        forward, arrays = tpu_peers.forward(options.peer, options.tpu_static, options.lower_bound, arrays)
        value = arrays["v"]
    tile = options.heads_per_step and tiles.Tile(options.heads_per_step, options.heads_per_step)

    def both(arrays, do):
        o, pull = jax.vjp(forward, arrays)
        return o, pull(do)

    return both if options.mode == "both" else forward, arrays, value


def recurrence(op: str, lower_bound: float | None, q, k, v, x=None, beta_logits=None, A_log=None, dt_bias=None):
    """The op on the TPU kernels with what its layer does around it; the decay of gated linear attention is arXiv 2312.06635's."""
    kernel = {"implementation": "pallas_tpu", "chunk_size": CHUNK}
    if op == "kda":
        return ops.kda_from_logits(q, k, v, x, beta_logits, A_log, dt_bias, lower_bound=lower_bound, **kernel).o
    if op == "linear_attention":
        return ops.linear_attention(q, k, v, **kernel).o
    if op == "gated_linear_attention":
        return ops.gated_linear_attention(q, k, v, jax.nn.log_sigmoid(x.astype(jnp.float32)) / 16, **kernel).o
    if op == "delta_rule":
        return ops.delta_rule_from_logits(q, k, v, beta_logits, **kernel).o
    return ops.gated_delta_rule_from_logits(q, k, v, x, beta_logits, A_log, dt_bias, **kernel).o


def least_bytes(options: StaticOptions, arrays: dict, do) -> int:
    """Forward: read the arrays, write the output. Backward: read the arrays and the cotangent, write the gradients."""
    inputs, output = (sum(x.size * x.dtype.itemsize for x in group) for group in (arrays.values(), [do]))
    return inputs + output + (2 * inputs + output if options.mode == "both" else 0)


def least_flops(options: StaticOptions) -> float:
    """Products of the chunkwise form as y = T (v - k~ S), T's inverse at 2 C^2 / 3 a token, its backward from saved states and T."""
    state, chunk = options.key_dim * options.value_dim, CHUNK * (options.key_dim + options.value_dim)
    if ops.REGISTRY[options.tpu_static].delta:
        forward, backward = 6 * state + 4 * chunk + 2 * CHUNK**2 / 3, 12 * state + 8 * chunk
    else:
        forward, backward = 4 * state + 2 * chunk, 8 * state + 4 * chunk
    return options.token_heads * (forward + (backward if options.mode == "both" else 0))


def enter(path: pathlib.Path, options: StaticOptions, report: Report) -> None:
    """Put the cycles per token-head into a file of budgets: a list with the command that made each."""
    default = StaticOptions(options.tpu_static)
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in ("json", "budgets")}
    told = {name: x for name, x in given.items() if name in ("tpu_static", "target", "mode") or x != getattr(default, name)}
    command = " ".join(["kda-jax bench", *(f"--{name.replace('_', '-')} {x}" for name, x in told.items())])
    entry = {"command": command, **_versions(), "cycles_per_token_head": round(report.cycles / options.token_heads, 2)}
    old = json.loads(path.read_text()) if path.exists() else []
    entries = sorted([e for e in old if e["command"] != command] + [entry], key=lambda e: e["command"])
    path.write_text("[\n " + ",\n ".join(json.dumps(e) for e in entries) + "\n]\n")


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def _print(options: StaticOptions, report: Report) -> None:
    n, mib = options.token_heads, 2**20
    shape = f"B={options.batch} T={options.tokens} H={options.heads} K={options.key_dim} V={options.value_dim} {options.dtype}"
    bound = "" if options.lower_bound is None else f" bounded by {options.lower_bound:g}"
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    of_peer = "" if options.peer is None else f" of {options.peer} {importlib.metadata.version(options.peer)}"
    table = Table(title=f"{options.tpu_static}{bound}{of_peer}, {options.mode}, {shape} on {report.device}; {versions}")
    shown = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")
    for column in ("kernel", "issue cycles", "per token-head", "bundles", *(f"{unit} %" for unit in shown), "spills", "fills", "VMEM MiB"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="fold")
    for kernel in report.kernels:
        note = f" ({kernel.unknown_loops} loops of unknown length counted once)" if kernel.unknown_loops else ""
        use = (f"{100 * kernel.slots[unit]:.0f}" if unit in kernel.slots else "-" for unit in shown)
        cost = f"{kernel.cycles}", f"{kernel.cycles / n:.2f}", f"{kernel.bundles}"
        table.add_row(kernel.name + note, *cost, *use, f"{kernel.spills}", f"{kernel.fills}", f"{kernel.vmem_bytes / mib:.1f}")
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    kernels = report.cycles - report.xla_cycles
    print(f"XLA: {report.xla_cycles} estimated cycles in {report.xla_ops} ops")
    print(f"cycles per token-head: {report.cycles / n:.2f} (kernels {kernels / n:.2f}, XLA {report.xla_cycles / n:.2f})")
    print(f"floors per token-head: HBM bytes {report.byte_floor:.2f}, MXU {report.mxu_floor:.2f}")
    sizes = (f"{name} {getattr(report, f'{name}_bytes') / mib:.1f} MiB" for name in ("argument", "output", "temporary"))
    print(f"HBM: {', '.join(sizes)}; compiled in {report.compile_seconds:.1f} s")


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(compile_and_read(pathlib.Path(sys.argv[1]), StaticOptions(**json.loads(sys.argv[2]))))))
