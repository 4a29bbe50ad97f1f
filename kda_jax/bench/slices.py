"""TPU slices by name: which there are, and what one chip has."""

import math
import re
from dataclasses import dataclass

from kda_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Chip:
    """One generation. Sizes and rates are per chip, from Google's "Cloud TPU system architecture" pages (cloud.google.com/tpu/docs)."""

    hbm_bytes: int
    flops_per_second: float
    """Peak in bfloat16."""
    devices: int
    """JAX devices per chip."""
    chips_per_host: int
    topologies: tuple[str, ...]
    """Those that Cloud TPU offers; others of the same form compile as well."""


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24".split()

CHIPS = {
    "v4": Chip(32 * 2**30, 275e12, 2, 4, (*_CUBES[:-1],)),
    "v5e": Chip(16 * 2**30, 197e12, 1, 4, _FLAT),
    "v5p": Chip(95 * 2**30, 459e12, 1, 4, (*_CUBES,)),
    "v6e": Chip(32 * 2**30, 918e12, 1, 4, _FLAT),
    "tpu7x": Chip(192 * 2**30, 2307e12, 2, 4, (*_CUBES,)),
}


@dataclass(frozen=True)
class Slice:
    """`generation:topology`, as libtpu knows it; or `cpu:N`, N fake devices to try a plan on without libtpu."""

    generation: str
    topology: str

    @property
    def name(self) -> str:
        return f"{self.generation}:{self.topology}"

    @property
    def is_tpu(self) -> bool:
        return self.generation != "cpu"

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.topology.split("x")))

    @property
    def devices(self) -> int:
        return self.chips * (CHIPS[self.generation].devices if self.is_tpu else 1)

    @property
    def hbm_bytes(self) -> int | None:
        """Of one device; None where that means nothing."""
        return CHIPS[self.generation].hbm_bytes // CHIPS[self.generation].devices if self.is_tpu else None

    @property
    def flops_per_second(self) -> float | None:
        """Peak of one device."""
        return CHIPS[self.generation].flops_per_second / CHIPS[self.generation].devices if self.is_tpu else None


def find(name: str) -> Slice:
    """The slice of a name such as v5p:4x4x4, v6e:16x16 or cpu:8.

    Raises:
        UserError: a generation that is not known, or a topology that is not of its form; with those that are known.
    """
    generation, _, topology = name.partition(":")
    if generation == "cpu" and re.fullmatch(r"[1-9]\d*", topology):
        return Slice(generation, topology)
    if generation not in CHIPS:
        raise UserError(f"there is no slice {name!r}{nearest(name, known())}; known: {', '.join(known())}, or cpu:N for N fake devices")
    axes = CHIPS[generation].topologies[0].count("x") + 1
    if not re.fullmatch("x".join([r"[1-9]\d*"] * axes), topology):
        raise UserError(
            f"there is no slice {name!r}: a topology of {generation} has {axes} numbers; known: "
            f"{', '.join(f'{generation}:{t}' for t in CHIPS[generation].topologies)}"
        )
    return Slice(generation, topology)


def known() -> list[str]:
    """All slices that Cloud TPU offers, by name."""
    return [f"{generation}:{topology}" for generation, chip in CHIPS.items() for topology in chip.topologies]
