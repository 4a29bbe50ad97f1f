"""How many heads a grid step takes: from a table per device that a search has written, within a core's VMEM."""

import contextlib
import contextvars
import functools
import json
import pathlib
from typing import NamedTuple

import jax

from pallas_kernels.tpu.plan import LANES

TUNED = pathlib.Path(__file__).parents[1] / "tuned"
DEVICES = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
FALLBACK = "v6e"  # the table of a device that has none
SUBLANES = 8  # heads of a block, unless it holds all of them
MOST_HEADS = 16  # of a step: more only lengthen the program
VMEM_BYTES = 60 * 2**20  # of 64 MiB per core on v5p and tpu7x, 128 MiB on v5e and v6e
# Values of C x (K + V) float32 that one head of a step keeps beside its blocks: from the compiler's allocations, rounded up.
SCRATCH = {"none": (3, 12), "head": (3, 12), "bounded": (7, 18), "channel": (8, 30)}


class Tile(NamedTuple):
    """Value heads of a grid step."""

    forward: int
    backward: int


_forced: contextvars.ContextVar[Tile | None] = contextvars.ContextVar("tile", default=None)


@contextlib.contextmanager
def use(tile: Tile | None):
    """Calls traced inside take this tile, where it is legal, instead of the tuned one: for the search that tunes."""
    token = _forced.set(tile)
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def table(device: str) -> dict[str, Tile]:
    """Tiles by kind of kernel ("bounded_delta")."""
    path = TUNED / f"{device}.json"
    entries = json.loads((path if path.exists() else TUNED / f"{FALLBACK}.json").read_text())["heads"]
    return {kind: Tile(**tile) for kind, tile in entries.items()}


def device() -> str:
    """The TPU that a trace is for: of the mesh that it compiles for, else this process's."""
    meant = jax.sharding.get_abstract_mesh().abstract_device
    kind = meant.device_kind if meant is not None else jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    return DEVICES.get(kind, FALLBACK)


def kind(decay: str, delta: bool) -> str:
    return f"{decay}_delta" if delta else decay


def legal_heads(H: int, HV: int, most: int) -> int:
    """The most value heads of one grid step: a divisor of HV that holds whole groups, in blocks of 8 heads unless it is all; or 0."""
    group = HV // H
    legal = lambda n: HV % n == 0 and n % group == 0 and (n == HV or (n % SUBLANES == 0 and n // group % SUBLANES == 0))
    return max((n for n in range(1, most + 1) if legal(n)), default=0)


def choose_tile(decay: str, delta: bool, H: int, HV: int, C: int, K: int, V: int, exact: bool) -> Tile:
    """The tuned tile for `whole_heads`, or less where it does not fit.

    Raises:
      NotImplementedError: not even the smallest block fits, with the sizes.
    """
    tuned = _forced.get() or table(device()).get(kind(decay, delta), Tile(MOST_HEADS, SUBLANES))
    found = []
    for backward, most in enumerate(tuned):
        heads = legal_heads(H, HV, most) or legal_heads(H, HV, MOST_HEADS)
        while vmem_bytes(decay, heads, C, K, V, exact, bool(backward)) > VMEM_BYTES:
            less = legal_heads(H, HV, heads - 1)
            if not less:
                need = vmem_bytes(decay, heads, C, K, V, exact, bool(backward)) / 2**20
                raise NotImplementedError(
                    f"{heads} heads of chunk_size {C}, K {K}, V {V} need about {need:.0f} MiB of VMEM in the TPU kernels, which take "
                    f"{VMEM_BYTES // 2**20}; a smaller chunk_size or bfloat16 needs less"
                )
            heads = less
        found.append(heads)
    return Tile(*found)


def vmem_bytes(decay: str, heads: int, C: int, K: int, V: int, exact: bool, backward: bool) -> int:
    """About what a kernel allocates: its blocks twice (one is computed on while the other moves) and what it keeps between products."""
    K, V = (-(-n // LANES) * LANES for n in (K, V))
    wide = decay in ("channel", "bounded")
    tokens = (2 + wide) * K + 2 * V if not backward else (4 + 2 * wide) * K + 3 * V  # q k (g) v o; q k (g) v do and their gradients
    states, inverse = 4 * V * K, 4 * C * C  # two bfloat16 terms, or float32
    blocks = C * tokens * (4 if exact else 2) + states + inverse + 4 * V * K * (1 + backward)
    return heads * (2 * blocks + SCRATCH[decay][backward] * C * (K + V) * 4 * (1 + exact))


def refusal(q, k, v, g, beta, chunk_size: int) -> str | None:
    """The sentence of `choose_tile` for a call with arrays of these shapes and dtypes, or None where a tile fits."""
    decay = {None: "none", 3: "head", 4: "channel"}[None if g is None else len(g.shape)]
    exact = jax.numpy.result_type(q, k, v) != jax.numpy.bfloat16
    try:
        choose_tile(decay, beta is not None, *whole_heads(q.shape[2], v.shape[2]), chunk_size, q.shape[3], v.shape[3], exact)
    except NotImplementedError as error:
        return str(error)


def whole_heads(H: int, HV: int) -> tuple[int, int]:
    """Heads as the kernels take them: where no block of heads is legal, one query head per value head in whole blocks."""
    if legal_heads(H, HV, MOST_HEADS):
        return H, HV
    HV = HV if HV < SUBLANES else -(-HV // SUBLANES) * SUBLANES
    return HV, HV
