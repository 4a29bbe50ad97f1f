"""Kernels have first derivatives; what asks for a second one is told so."""

from collections.abc import Callable

import jax


def first_only(rule: Callable) -> Callable:
    """`rule(plan, *arrays)`, part of a derivative, as a function that refuses to be differentiated itself."""
    guarded = jax.custom_jvp(rule, nondiff_argnums=(0,))

    @guarded.defjvp
    def refuse(plan, primals, tangents):
        raise NotImplementedError("a kernel has first derivatives only: implementation 'xla' or 'scan' has second ones")

    return guarded
