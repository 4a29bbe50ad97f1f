"""`kda-jax plan`: the real train and decode steps compiled for a slice that is not there, and what each of its devices would hold and send.

The compiler is libtpu's, ahead of time, on a machine without a TPU; a program that does not fit fails here as it would there. Shapes and
shardings are those of `kda-jax train` with the same configuration: nothing is allocated.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from kda_jax import models, sharding
from kda_jax.bench.hlo import bytes_by_kind, bytes_by_source, collectives
from kda_jax.bench.slices import Slice, find
from kda_jax.config import RunConfig, from_dict, to_dict
from kda_jax.errors import UserError
from kda_jax.layers.caches import AttentionCache, LatentCache, RecurrentCache
from kda_jax.layers.params import cast
from kda_jax.train.data import Batch
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.state import initial_state, merge, shapes, split, state_shardings, with_shardings
from kda_jax.train.step import make_train_step

Program = Literal["train", "decode"]
Effort = Literal["quick", "full"]
_LESS_EFFORT = {"jax_exec_time_optimization_effort": -1.0, "jax_optimization_level": "O1"}
"""The first of these that this jax has: 0.12 has levels only."""
_CACHE_NAMES = {
    RecurrentCache: RecurrentCache(("batch", "heads", None, None), ("batch", None, None)),
    AttentionCache: AttentionCache(*[("batch", "keys", "heads", None)] * 2, *[("batch",)] * 2),
    LatentCache: LatentCache(("batch", "keys", None), *[("batch",)] * 2),
}
_SOURCES = 8
_USED = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMG])(?: of |\) exceeds available HBM \()([\d.]+)([KMG])")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One program on one slice; bytes and operations are those of one device."""

    program: Program
    slice: str
    mesh: str
    rows: int
    context: int
    """Tokens of a row: predicted in training, in the cache when decoding."""
    needed_bytes: int
    """At the peak."""
    hbm_bytes: int | None
    """There is; None for fake devices."""
    argument_bytes: int | None
    """State, batch or cache; None, as the next ones, if the program does not fit."""
    temporary_bytes: int | None
    collective_bytes: dict[str, int]
    """By kind, in one step; what is sent grows with it but is less."""
    collective_sources: dict[str, int]
    """The largest of them by what they come from."""
    collective_count: int
    uncounted_loops: int
    """Collectives inside loops whose length is not known beforehand, counted once."""
    model_flops: float
    """Of one step, without what is recomputed."""
    seconds_at_peak: float | None
    """To compute them at the chip's peak: no step is faster."""
    compile_seconds: float
    compiler_gigabytes: float
    """Memory that the compiling process has used."""
    effort: Effort = "full"
    """The compiler's, for the speed of the program."""

    @property
    def fits(self) -> bool:
        return self.hbm_bytes is None or self.needed_bytes <= self.hbm_bytes


def plan(config: RunConfig, topology: str, program: Program, rows: int, context: int, effort: Effort = "full") -> Plan:
    """Compile in a process of its own, for libtpu and fake devices both need an environment that is set before JAX starts.

    Args:
        config: the run; its mesh must have as many devices as the slice.
        topology: see `slices.find`.
        program: which step.
        rows, context: of the decode step's cache.
        effort: "quick" compiles a program that would run slower, in about half the time; it needs a few percent less HBM.

    Raises:
        UserError: an unknown slice, a mesh that does not match it, libtpu is missing, or the program does not compile.
    """
    where = find(topology)
    if config.mesh.size != where.devices:
        raise UserError(
            f"{where.name} has {where.devices} devices and the mesh is of {config.mesh.size} ({config.mesh}): the product of --mesh.data, "
            f"--mesh.fsdp, --mesh.expert, --mesh.tensor and --mesh.context must be {where.devices}"
        )
    if where.is_tpu and importlib.util.find_spec("libtpu") is None:
        raise UserError('plan compiles with libtpu, which is not installed: pip install "jax[tpu]" (no TPU is needed), or try cpu:N')
    request = {"config": to_dict(config), "topology": topology, "program": program, "rows": rows, "context": context, "effort": effort}
    command = [sys.executable, "-m", "kda_jax.bench.plan"]
    child = subprocess.run(command, env=_environment(where), input=json.dumps(request), capture_output=True, text=True)
    if child.returncode:
        said = [line for line in child.stderr.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
        reason = next((line for line in reversed(said) if re.match(r"[\w.]*(Error|Exception)\b", line)), said[-1])
        raise UserError(f"the {program} step does not compile for {where.name}: {reason[:500]}")
    return Plan(**json.loads(child.stdout.splitlines()[-1]))


def _environment(where: Slice) -> dict[str, str]:
    fake = f"--xla_force_host_platform_device_count={where.devices} --xla_backend_optimization_level=0"  # nobody runs this code
    flags = {} if where.is_tpu else {"XLA_FLAGS": fake}
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | own | flags


def compile_plan(config: RunConfig, where: Slice, program: Program, rows: int, context: int, effort: Effort) -> Plan:
    """The plan itself, in a process with the environment above."""
    if where.is_tpu and effort == "quick":
        jax.config.update(*next(option for option in _LESS_EFFORT.items() if option[0] in jax.config.values))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=where.name).devices if where.is_tpu else jax.devices()
    mesh = sharding.make_mesh(config.mesh, devices)
    function, arguments = (_train if program == "train" else functools.partial(_decode, rows=rows, context=context))(config, mesh)
    if program == "train":
        rows, context = config.train.batch_size, config.data.seq_len
    flops = _model_flops(config, program, rows, context) / where.devices
    start, compiled, needed, hbm = time.perf_counter(), None, 0, where.hbm_bytes
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(_described(mesh)):
        lowered = function.trace(*arguments).lower(lowering_platforms=("tpu" if where.is_tpu else "cpu",))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed, hbm = _overflow(error)
    text, memory = ("", None) if compiled is None else (compiled.as_text(), compiled.memory_analysis())
    if memory is not None:
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = max(kept + memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0))
    found = collectives(text)
    return Plan(
        program=program,
        slice=where.name,
        mesh=str(config.mesh),
        rows=rows,
        context=context,
        needed_bytes=needed,
        hbm_bytes=hbm,
        argument_bytes=memory and memory.argument_size_in_bytes,
        temporary_bytes=memory and memory.temp_size_in_bytes,
        collective_bytes=bytes_by_kind(found),
        collective_sources=dict(itertools.islice(bytes_by_source(found).items(), _SOURCES)),
        collective_count=sum(collective.times for collective in found),
        uncounted_loops=sum(collective.unknown_loops > 0 for collective in found),
        model_flops=flops,
        seconds_at_peak=None if where.flops_per_second is None else flops / where.flops_per_second,
        compile_seconds=time.perf_counter() - start,
        compiler_gigabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        effort=effort,
    )


def _described(mesh: jax.sharding.Mesh) -> jax.sharding.AbstractMesh:
    """The mesh for tracing, with the kind of its devices: by that the ops choose their kernels, and the kernels their sizes."""
    abstract, device = mesh.abstract_mesh, mesh.devices.flat[0]
    if abstract.abstract_device is not None:
        return abstract
    return abstract.update(abstract_device=jax.sharding.AbstractDevice(device.device_kind, num_cores=1, platform=device.platform))


def _train(config: RunConfig, mesh: jax.sharding.Mesh) -> tuple[Any, tuple]:
    """The train step and the shapes of its arguments."""
    optimizer, model = make_optimizer(config.optim, config.model), shapes(config.model)
    state = jax.eval_shape(lambda: initial_state(config.model, optimizer, config.train.seed))
    placed = state_shardings(model, state, mesh)
    schedule = make_schedule(config.optim, config.train.steps)
    step = make_train_step(split(model)[0], optimizer, schedule, config, placed)
    tokens = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), jnp.int32)
    tokens = with_shardings(tokens, sharding.activation_sharding(mesh, ("batch",), tokens.shape[:1]))
    return step, (with_shardings(state, placed), Batch(tokens, tokens))


def _decode(config: RunConfig, mesh: jax.sharding.Mesh, *, rows: int, context: int) -> tuple[Any, tuple]:
    """One token for every row against a cache of `context` tokens, and the shapes of its arguments."""
    model = shapes(config.model)
    graphdef, params, buffers = split(model)
    dtype = jnp.dtype(config.train.compute_dtype)
    params = jax.eval_shape(lambda: cast(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), dtype))
    cache = jax.eval_shape(lambda model: model.init_cache(rows, context, dtype), model)
    placed = [state_shardings(model, tree, mesh) for tree in (params, buffers)]
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=sharding.activation_sharding(mesh, ("batch",), (rows,)))

    def step(params: dict, buffers: dict, cache: Any, tokens: Any) -> tuple[Any, Any]:
        out = merge(graphdef, params, buffers)(tokens, cache=cache)
        return jnp.argmax(out.logits[:, -1], axis=-1), out.cache

    arguments = *(with_shardings(tree, place) for tree, place in zip((params, buffers), placed, strict=True)), _placed(cache, mesh), tokens
    return jax.jit(step, donate_argnums=2), arguments


def _placed(cache: Any, mesh: jax.sharding.Mesh) -> Any:
    """The shapes of a cache with rows and heads where the model has them."""

    def place(x: jax.ShapeDtypeStruct, names: sharding.Names) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.activation_sharding(mesh, names, x.shape))

    def entry(x: Any) -> Any:
        if type(x) not in _CACHE_NAMES:
            return place(x, ("batch",))
        return type(x)(*(leaf if leaf is None else place(leaf, names) for leaf, names in zip(x, _CACHE_NAMES[type(x)], strict=True)))

    return jax.tree.map(entry, cache, is_leaf=lambda x: type(x) in _CACHE_NAMES)


def _model_flops(config: RunConfig, program: Program, rows: int, context: int) -> float:
    count = models.count(config.model)
    if program == "train":
        return 3.0 * rows * context * count.flops_per_token(context)
    return float(rows * (count.flops_base + 2 * context * count.flops_per_position))  # a decoded token sees all of the context


def _overflow(error: Exception) -> tuple[int, int]:
    """(needed, there) of a program that is too large; anything else is raised again."""
    found = _USED.search(str(error))
    if found is None:
        raise error
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(found[1]) * unit[found[2]]), int(float(found[3]) * unit[found[4]])


def told(config: RunConfig, found: Plan) -> str:
    """The plan in lines for people."""
    fmt = lambda n: "-" if n is None else f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"
    lines = [
        f"{found.program} step of {config.name} on {found.slice}, {found.mesh}: {found.rows} rows, {found.context:,} tokens each",
        f"  HBM per device   {fmt(found.needed_bytes)} at the peak of {fmt(found.hbm_bytes)}: arguments {fmt(found.argument_bytes)}, "
        f"temporaries {fmt(found.temporary_bytes)}",
    ]
    sent = ", ".join(f"{kind} {fmt(size)}" for kind, size in found.collective_bytes.items()) or "none"
    loops = f" ({found.uncounted_loops} inside loops of unknown length, counted once)" if found.uncounted_loops else ""
    lines.append(f"  collectives      {sent}; {found.collective_count:,} a step{loops}")
    lines += [f"    {fmt(size):>10}     {source}" for source, size in found.collective_sources.items()]
    peak = "" if found.seconds_at_peak is None else f", {found.seconds_at_peak:.3g} s at the chip's peak"
    lines.append(f"  model FLOPs      {found.model_flops:.3g} per device{peak}")
    lines.append(f"  compiled         in {found.compile_seconds:.0f} s with {found.compiler_gigabytes:.1f} GB")
    near = found.effort == "quick" and found.hbm_bytes is not None and found.needed_bytes > 0.9 * found.hbm_bytes
    fits = "  fits barely: --effort full compiles the program that training would run" if near else "  fits"
    lines.append(fits if found.fits else f"  DOES NOT FIT: {advice(config, found)}")
    return "\n".join(lines)


def advice(config: RunConfig, found: Plan) -> str:
    """What to change about a plan that does not fit."""
    if found.program == "decode":
        return "use fewer --decode-rows, a larger --mesh.tensor or --mesh.expert, or more chips"
    count, devices = models.count(config.model).total, config.mesh.size
    state = 8 if config.optim.algorithm == "muon" else 12
    if found.hbm_bytes is not None and state * count / devices > 0.7 * found.hbm_bytes:
        return (
            f"parameters and moments alone take {state * count / devices / 1e9:.1f} GB of each device: use more chips, or "
            "--optim.first-moment-dtype bfloat16"
        )
    ways = []
    if hasattr(config.model, "num_experts") and config.mesh.expert > 1 and config.train.expert_capacity is None:
        ways.append("--train.expert-capacity 2 (without one, every owner of experts has room for all tokens)")
    if config.model.remat != "full":
        ways.append("--model.remat full")
    if config.train.batch_size // config.train.micro_batches > config.mesh.row_parts:
        ways.append(f"--train.micro-batches {config.train.batch_size // config.mesh.row_parts}")
    ways += ["a larger --mesh.tensor (splits logits and heads) or --mesh.context (splits rows)", "more chips"]
    return "use " + ", or ".join(ways)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    request["config"], request["where"] = from_dict(request["config"]), find(request.pop("topology"))
    print(json.dumps(dataclasses.asdict(compile_plan(**request))))
