"""Where arrays live on a mesh: the one place that knows the names of its axes.

    data      splits the rows of a batch; parameters are copied
    fsdp      splits the rows of a batch, and what is stored of every parameter
    expert    splits the experts; for everything else it is one more fsdp axis
    tensor    splits heads, FFN widths and the vocabulary
    context   splits time

Parameters and activations carry logical names ("embed", "heads", "batch", "time"). `PARAMETERS` and `ACTIVATIONS` say which mesh axes may
split an axis of that name: each in turn, as long as the size stays whole; what an axis does not divide, it leaves whole. So an odd
vocabulary or three heads on two devices cost memory, never an error (`parameter_report` names them); only what would waste the mesh is
refused, in one sentence, by the code that knows the option to change.

All functions read the mesh that `jax.set_mesh` has set. Without one, on a mesh of one device, and inside somebody else's `jax.shard_map`
they do nothing.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kda_jax.errors import UserError, nearest

AXES = ("data", "fsdp", "expert", "tensor", "context")
Names = Sequence[str | None]
"""Logical names of an array's last axes; axes before them, as stacked layers have, stay whole."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "experts": ("expert",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "latent": (),
    "embed": ("fsdp", "expert", "context"),
}
_STORED = "embed"
"""The name whose axes only spread what is stored: a block gathers it before use."""

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "time": ("context",),
    "keys": (),
    "embed": (),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "stored": ("fsdp", "context"),
    "matrices": ("fsdp", "expert", "context", "tensor", "data"),  # as "embed" is stored: matrices come and go in all-to-alls
}


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; their product is the number of devices."""

    data: int = 1
    """Copies of the model, each with its own rows."""
    fsdp: int = 1
    """Parts that parameters and moments are stored in; rows are split as well."""
    expert: int = 1
    """Parts that the experts are split into; rows are split as well."""
    tensor: int = 1
    """Parts that heads, FFN widths and the vocabulary are split into."""
    context: int = 1
    """Parts that the tokens of a row are split into."""
    axis_type: Literal["auto", "explicit"] = "auto"
    """auto: shardings are the compiler's. explicit: they are part of the arrays' types (`jax.typeof`). Same numbers."""

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} must be at least 1, got {getattr(self, axis)}")
        if self.axis_type not in ("auto", "explicit"):
            raise ValueError(f"mesh.axis_type must be 'auto' or 'explicit', got {self.axis_type!r}")

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row_parts(self) -> int:
        """Parts that the rows of a batch are split into."""
        return math.prod(getattr(self, axis) for axis in ACTIVATIONS["batch"])

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1) or "one device"


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config`; enter it with `jax.set_mesh`.

    Args:
        config: sizes and type of the axes.
        devices: to lay out; all devices if None, or the first for a mesh of one.

    Raises:
        UserError: their number is not the product of the sizes.

    Example:
        >>> from kda_jax import sharding
        >>> sharding.make_mesh(sharding.MeshConfig()).shape["fsdp"]
        1
    """
    if devices is None:
        devices = jax.devices()[:1] if config.size == 1 else jax.devices()
    if config.size != len(devices):
        product = " x ".join(f"mesh.{axis} {size}" for axis, size in zip(AXES, config.shape, strict=True))
        raise UserError(f"{product} makes {config.size} devices, and there are {len(devices)}: the product must be {len(devices)}")
    kind = AxisType.Auto if config.axis_type == "auto" else AxisType.Explicit
    grid = mesh_utils.create_device_mesh(config.shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(kind,) * len(AXES))


def parameter_sharding(mesh: Mesh | jax.sharding.AbstractMesh, names: Names, shape: Sequence[int]) -> NamedSharding:
    """Where a parameter is stored. A vector over the model's width is copied: to gather it would take longer than to keep it.

    Args:
        mesh: from `make_mesh`.
        names: logical names of the parameter's last axes; the axes before them, of stacked layers, stay whole.
        shape: of the parameter; an axis that its mesh axes do not divide stays whole.

    Raises:
        ValueError: a name that is not one of the logical names.
    """
    return NamedSharding(mesh, _spec(mesh.shape, _without_stored(PARAMETERS) if len(names) == 1 else PARAMETERS, names, shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, P())


def parameter_report(mesh: Mesh | jax.sharding.AbstractMesh, parameters: Mapping[str, tuple[Names, Sequence[int]]]) -> list[str]:
    """One sentence for each parameter axis that a mesh axis does not divide and so leaves whole.

    Args:
        parameters: logical names and shape by dotted path.
    """
    found = []
    for path, (names, shape) in parameters.items():
        spec = parameter_sharding(mesh, names, shape).spec
        for name, size, taken in zip(names, shape[len(shape) - len(names) :], spec[len(shape) - len(names) :], strict=True):
            for axis in PARAMETERS.get(name, ())[:1] if len(names) > 1 else ():
                if mesh.shape[axis] > 1 and axis not in _tuple(taken):
                    found.append(f"{path}: {name} {size} is not a multiple of mesh.{axis} {mesh.shape[axis]} and stays whole over it")
    return found


def constrain(x: Array, *names: str | None) -> Array:
    """`x` split over the ambient mesh as the logical names of its axes say; `x` itself without a mesh."""
    mesh = ambient()
    return x if mesh is None else _place(mesh, x, _spec(mesh.shape, ACTIVATIONS, names, x.shape))


def store(x: Array, names: Names) -> Array:
    """`x`, of a parameter's shape and names, where that parameter is stored; `x` itself without a mesh."""
    mesh = ambient()
    return x if mesh is None else _place(mesh, x, _spec(mesh.shape, PARAMETERS, names, x.shape))


def gather(x: Array, names: Names) -> Array:
    """A parameter as a product needs it: whole over the axes that only store it. Its gradient is summed straight into the stored parts.
    Experts are left to `ops.experts`, which does the same for the experts that a device owns.

    The result is named "gathered", for rematerialisation policies: kept for the backward pass, it would undo the saving.
    """
    mesh = ambient()
    if mesh is None:
        return x
    stored, used = (_spec(mesh.shape, rules, names, x.shape) for rules in (PARAMETERS, _without_stored(PARAMETERS)))
    if stored == used or len(names) == 1 or "experts" in names:
        return x
    return checkpoint_name(_gather(x, stored, used), GATHERED)


GATHERED = "gathered"


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, stored: P, used: P) -> Array:
    return _place(ambient(), x, used)


_gather.defvjp(lambda x, stored, used: (_gather(x, stored, used), None), lambda stored, used, _, dx: (_place(ambient(), dx, stored),))


class Shards:
    """How the parts that `local_map` hands to a function lie in the whole. The collectives are over the devices that split a name."""

    def __init__(self, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]):
        self._axes, self._sizes = axes, sizes

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that split `name` here, as `jax.lax` collectives take them; empty where it is whole."""
        return self._axes.get(name, ())

    def count(self, name: str) -> int:
        """Number of parts along `name`."""
        return math.prod(self._sizes[axis] for axis in self.axes(name))

    def index(self, name: str) -> Array | int:
        """Which of them this one is."""
        return jax.lax.axis_index(self.axes(name)) if self.axes(name) else 0

    def sum(self, x: Any, *names: str) -> Any:
        """Sum over all parts along `names`."""
        axes = tuple(axis for name in names for axis in self.axes(name))
        return jax.lax.psum(x, axes) if axes else x

    def gather(self, x: Array, name: str) -> Array:
        """[count, ...]: `x` of every part along `name`."""
        return jax.lax.all_gather(x, self.axes(name)) if self.axes(name) else x[None]

    def whole(self, x: Array, name: str, axis: int) -> Array:
        """The parts of `x` along `name` joined at `axis`: a parameter's, whose gradient is summed straight into the parts."""
        if not self.axes(name):
            return x
        return checkpoint_name(jax.lax.all_gather(x, self.axes(name), axis=axis, tiled=True), GATHERED)

    def before(self, x: Array, name: str) -> Array:
        """`x` of the part before this one along `name`; zeros in the first."""
        (axis,) = self.axes(name)
        return jax.lax.ppermute(x, axis, [(i, i + 1) for i in range(self._sizes[axis] - 1)])


def local_map(f: Callable, args: Sequence[Array | None], names: Sequence[Names | None], out_names: Any, whole: Iterable[str] = ()) -> Any:
    """`f(shards, *parts)` on every device's parts of `args`: what must see plain arrays, such as kernels, sorts and recurrences.

    A name is split alike in all arguments, by the mesh axes that divide its size in each. Without a mesh `f` gets the arguments whole.

    Args:
        f: (Shards, *parts) -> parts of the results.
        args: arrays, or None.
        names: logical names of every axis of each argument (`ACTIVATIONS`).
        out_names: those of the results, in the form in which `f` returns them; a name whole in all arguments is whole in the results.
        whole: names that are to stay whole here.
    """
    mesh = ambient()
    if mesh is None:
        return f(Shards({}, {}), *args)
    given = [i for i, x in enumerate(args) if x is not None]
    sizes: dict[str, int] = {}
    for i in given:
        for name, size in zip(names[i], args[i].shape, strict=True):
            if name is not None and name not in whole:
                sizes[name] = math.gcd(sizes.get(name, 0), size)
    axes = {name: _divide(mesh.shape, size, _rule(ACTIVATIONS, name)) for name, size in sizes.items()}
    shards = Shards(axes, mesh.shape)

    def body(*parts: Array) -> Any:
        full: list[Array | None] = [None] * len(args)
        for i, part in zip(given, parts, strict=True):
            full[i] = part
        return f(shards, *full)

    def spec(names: Names) -> P:
        return P(*(axes.get(name, ()) or None for name in names))

    specs, parts = [spec(names[i]) for i in given], [args[i] for i in given]
    if _is_explicit(mesh):  # where the caller's arrays lie is part of their types, and no reason to refuse them
        parts = [_place(mesh, x, at) for x, at in zip(parts, specs, strict=True)]
    out = jax.tree.map(spec, out_names, is_leaf=_is_names)
    return jax.shard_map(body, in_specs=tuple(specs), out_specs=out, check_vma=False)(*parts)


def padded(name: str, size: int) -> int:
    """The size that an axis of `size` elements must be padded to for the ambient mesh to split it."""
    mesh = ambient()
    multiple = 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in _rule(ACTIVATIONS, name))
    return -(-size // multiple) * multiple


def parts(name: str, size: int) -> int:
    """Into how many parts the ambient mesh splits an axis of `size` elements."""
    mesh = ambient()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in _divide(mesh.shape, size, _rule(ACTIVATIONS, name)))


def evened(name: str, size: int, beside: tuple[str, int]) -> int:
    """The size, up to three times as many, that an axis must be padded to for the devices that another axis, of name and size `beside`,
    leaves it to have the fewest each; of those sizes one that most devices share, so that few have copies."""
    mesh = ambient()
    if mesh is None:
        return size
    used = _divide(mesh.shape, beside[1], _rule(ACTIVATIONS, beside[0]))
    parts = lambda n: math.prod(mesh.shape[axis] for axis in _divide(mesh.shape, n, _rule(ACTIVATIONS, name), used))
    return min(range(size, 3 * size + 1), key=lambda n: (n // parts(n), -parts(n), n))


def automatic(f: Callable, out: Any) -> Callable:
    """On an explicit mesh, `f` with shardings inside left to the compiler and its results as `out` says; `f` itself elsewhere.

    Args:
        out: PartitionSpecs or shardings, a prefix of the tree of results.
    """

    @functools.wraps(f)
    def wrapped(*args):
        if not _is_explicit(jax.sharding.get_abstract_mesh()):
            return f(*args)
        specs = jax.tree.map(lambda s: getattr(s, "spec", s), out, is_leaf=lambda s: isinstance(s, P))
        return jax.sharding.auto_axes(f, out_sharding=specs)(*args)

    return wrapped


def put_rows(batch: Any, rows: np.ndarray | None = None, count: int | None = None) -> Any:
    """A batch on the ambient mesh, split over its rows; the batch itself without a mesh.

    Args:
        batch: arrays with an axis of rows first.
        rows: their numbers in the whole batch, from `local_rows`; None for a process that has all of them.
        count: of the whole batch's rows.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch

    def put(x: Any) -> Array:
        shape = (len(x) if count is None else count, *x.shape[1:])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, stop, _ = index[0].indices(shape[0])
            held = slice(first, stop) if rows is None else np.searchsorted(rows, np.arange(first, stop))
            return x[held]

        return jax.make_array_from_callback(shape, activation_sharding(mesh, ("batch",), shape[:1]), part)

    return jax.tree.map(put, batch)


def local_rows(count: int) -> np.ndarray:
    """Numbers of the rows, of a batch of `count`, that this process's devices hold on the ambient mesh: what it has to read."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return np.arange(count)
    parts = activation_sharding(mesh, ("batch",), (count,)).addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([np.arange(count)[part] for part in parts]))


def activation_sharding(mesh: Mesh, names: Names, shape: Sequence[int]) -> NamedSharding:
    """Where an activation with these logical names is on `mesh`; axes before the named ones stay whole."""
    return NamedSharding(mesh, _spec(mesh.shape, ACTIVATIONS, names, shape))


def no_mesh() -> contextlib.AbstractContextManager:
    """For what runs where its arrays are, whichever mesh the caller has set."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def untyped(x: Array) -> Array:
    """The same buffers with shardings that are not part of the array's type, for what runs under no mesh."""
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return x
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(auto, x.sharding.spec), [s.data for s in x.addressable_shards])


def platform() -> str:
    """What a computation is traced for: the devices of the ambient mesh, which may be of a slice that is not there; else the default."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """Its name there, as "NVIDIA H200"."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return (jax.devices()[0] if device is None else device).device_kind


def ambient() -> jax.sharding.AbstractMesh | None:
    """The mesh to place arrays on, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or inside_shard_map() else mesh


def inside_shard_map() -> bool:
    """Whether arrays are one device's parts already."""
    return any(kind == AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types or ())


def _is_explicit(mesh: jax.sharding.AbstractMesh) -> bool:
    return not mesh.empty and all(kind == AxisType.Explicit for kind in mesh.axis_types)


def _place(mesh: jax.sharding.AbstractMesh, x: Array, spec: P) -> Array:
    return jax.sharding.reshard(x, spec) if _is_explicit(mesh) else jax.lax.with_sharding_constraint(x, spec)


def _spec(sizes: Mapping[str, int], rules: Mapping[str, tuple[str, ...]], names: Names, shape: Sequence[int]) -> P:
    """Each axis of `shape` to the mesh axes that split it; no mesh axis is used twice."""
    entries: list[tuple[str, ...]] = [()] * (len(shape) - len(names))
    for name, size in zip(names, shape[len(shape) - len(names) :], strict=True):
        used = {axis for entry in entries for axis in entry}
        entries.append(() if name is None else _divide(sizes, size, _rule(rules, name), used))
    return P(*(entry or None for entry in entries))


def _divide(sizes: Mapping[str, int], size: int, wanted: Iterable[str], used: Iterable[str] = ()) -> tuple[str, ...]:
    """The mesh axes of `wanted` that split an axis of `size` elements, in turn."""
    chosen = []
    for axis in wanted:
        parts = sizes.get(axis, 1)
        if parts > 1 and axis not in used and size % parts == 0:
            chosen.append(axis)
            size //= parts
    return tuple(chosen)


def _rule(rules: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    if name not in rules:
        raise ValueError(f"no rule for the logical axis name {name!r}{nearest(name, rules)}; there are {', '.join(rules)}")
    return rules[name]


def _without_stored(rules: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {**rules, _STORED: ()}


def _is_names(x: Any) -> bool:
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def _tuple(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
