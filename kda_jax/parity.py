"""How close a model is to a reference: logits as a whole, and sublayer by sublayer to find where it leaves."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.models import LanguageModel
from kda_jax.models.inputs import read_inputs


class LogitParity(NamedTuple):
    """Agreement with a reference over all positions."""

    kl_mean: float
    """Kullback-Leibler divergence of our next-token distribution from the reference's, nats, mean over positions."""
    kl_max: float
    """The worst position's."""
    top1: float
    """Share of positions at which both put the same token first."""
    top5: float
    """Mean share of the reference's five likeliest tokens that are among ours."""
    max_error: float
    """Largest difference of two logits."""
    rms_error: float
    """RMS(difference) / RMS(reference)."""

    def __str__(self) -> str:
        return (
            f"KL {self.kl_mean:.3e} nats per token, {self.kl_max:.3e} at worst; top-1 {self.top1:.2%}, top-5 {self.top5:.2%}; "
            f"largest logit error {self.max_error:.3e}, rms {self.rms_error:.3e}"
        )


@no_type_check  # its own check raises ValueError with both shapes
def compare_logits(logits: Float[np.ndarray, "B T Z"], reference: Float[np.ndarray, "B T Z"]) -> LogitParity:
    """Compare in float64, position by position.

    Args:
        logits, reference: [B, T, Z] of the same tokens.

    Raises:
        ValueError: shapes that differ.
    """
    if logits.shape != reference.shape:
        raise ValueError(f"logits have shape {logits.shape} and the reference {reference.shape}; expected the same")
    x, ref = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (logits, reference))
    log_p, log_q = _log_softmax(ref), _log_softmax(x)
    kl = np.maximum(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1), 0)
    k = min(5, x.shape[-1])
    best = [np.argsort(-a, axis=-1, kind="stable")[:, :k] for a in (x, ref)]
    shared = np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(*best, strict=True)])
    error = x - ref
    rms = np.sqrt(np.mean(error**2)) / max(np.sqrt(np.mean(ref**2)), np.finfo(np.float64).tiny)
    same = np.mean(best[0][:, 0] == best[1][:, 0])
    return LogitParity(*map(float, (kl.mean(), kl.max(), same, shared, np.abs(error).max(), rms)))


def forward_logits(model: LanguageModel, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T Z"]:
    """The model's logits in float32, row by row: one program, whatever the number of rows."""
    run = jax.jit(lambda model, row: model(row).logits.astype(jnp.float32))
    return np.concatenate([np.asarray(run(model, jnp.asarray(row[None], jnp.int32))) for row in tokens])


def activations(model: LanguageModel, tokens: Int[np.ndarray, "B T"]) -> dict[str, np.ndarray]:
    """The output of every module of every layer, in the order in which they are computed.

    Names are those of the released checkpoints, "layers.3.self_attn.q_proj" and so on, so that forward hooks of a reference give the same
    ones; before them "embed_tokens", after them "logits".

    Args:
        model: any; its layers run one after another, not scanned.
        tokens: [B, T].

    Returns:
        name -> float32 array.
    """
    found: dict[str, np.ndarray] = {}
    inputs = read_inputs(jnp.asarray(tokens, jnp.int32), None, None, model.config.vocab_size)
    x = jax.jit(lambda model, inputs: model.embed(inputs))(model, inputs)
    found["embed_tokens"] = np.asarray(x, np.float32)
    stack = model.stack
    x = stack.enter(x)
    for i in range(stack.layout.depth):
        x, inside = _run_block(stack.layer(i), x)
        found |= {f"layers.{i}.{name}": np.asarray(value) for name, value in inside.items()}
        found[f"layers.{i}"] = np.asarray(getattr(x, "prefix", x), np.float32)
    found["logits"] = np.asarray(jax.jit(lambda model, x: model.head(x).astype(jnp.float32))(model, x))
    return found


@jax.jit
def _run_block(block: nnx.Module, x: Any) -> tuple[Any, OrderedDict[str, Array]]:
    """What comes out of a block, and out of every module inside it in the order of the calls; layers of a kind share the program."""
    inside: OrderedDict[str, Array] = OrderedDict()

    def note(name: str, value: Any) -> None:
        value = getattr(value, "y", value)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
            inside[name] = value.astype(jnp.float32)

    _tap(block, "", note)  # inside jit: a copy of the caller's
    return block(x).x, inside


class Difference(NamedTuple):
    """A module's output against the reference's."""

    name: str
    error: float
    """RMS(difference) / RMS(reference)."""


def compare_activations(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[Difference]:
    """Of every name that both have, in the order of `found`.

    Raises:
        ValueError: no name in common, or an array of another size; a reference may be shaped otherwise (heads apart).
    """
    shared = [name for name in found if name in reference]
    if not shared:
        raise ValueError(f"the reference has none of the names {', '.join(list(found)[:4])}, ...; it has {', '.join(list(reference)[:4])}")
    differences = []
    for name in shared:
        x, ref = np.asarray(found[name], np.float64), np.asarray(reference[name], np.float64)
        if x.size != ref.size:
            raise ValueError(f"{name} has shape {x.shape} and the reference {ref.shape}")
        scale = max(np.sqrt(np.mean(ref**2)), np.finfo(np.float32).tiny)
        differences.append(Difference(name, float(np.sqrt(np.mean((x.reshape(-1) - ref.reshape(-1)) ** 2)) / scale)))
    return differences


def _tap(module: nnx.Module, name: str, note: Callable[[str, Any], None]) -> None:
    """Have every module below `module`, which is changed, report what it gives."""
    for key, child in list(vars(module).items()):
        if isinstance(child, nnx.Module) and callable(child):
            path = f"{name}.{key}" if name else key
            _tap(child, path, note)
            object.__setattr__(child, "__class__", _tapped(type(child), path, note))


def _tapped(cls: type[nnx.Module], name: str, note: Callable[[str, Any], None]) -> type[nnx.Module]:
    """A class that is `cls`, but reports what a call gives."""

    def _call(self, *args: Any, **keywords: Any) -> Any:
        out = cls.__call__(self, *args, **keywords)
        note(name, out)
        return out

    return type(cls)(cls.__name__, (cls,), {"__call__": _call})


def _log_softmax(x: Float[np.ndarray, "n Z"]) -> Float[np.ndarray, "n Z"]:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
