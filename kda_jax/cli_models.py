"""Commands that look at a model: parity with a reference, sublayer by sublayer, and memory."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import tyro

from kda_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class ParityOptions:
    """Compare a model's logits with a reference's."""

    model: tyro.conf.Positional[Path]
    """Hugging Face directory or run directory."""
    reference: Path
    """npz with `tokens` [B, T] and the reference's `logits` [B, T, vocabulary]."""
    max_kl: float = 1e-3
    """Largest mean KL divergence, nats per token, to pass."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """To compute in; None: that of the files."""


@dataclasses.dataclass(frozen=True)
class LayersOptions:
    """Write the output of every sublayer, or compare it with a reference's and name the first one that differs."""

    model: tyro.conf.Positional[Path]
    """Hugging Face directory or run directory."""
    tokens: str | None = None
    """Token ids, separated by commas. None: those of the reference."""
    reference: Path | None = None
    """npz with `tokens` [B, T] and arrays named "layers.3.self_attn", "layers.3.self_attn.q_proj", ... as --out writes them."""
    out: Path | None = None
    """npz to write."""
    tolerance: float = 1e-3
    """Largest RMS(difference) / RMS(reference) of a sublayer."""
    dtype: Literal["float32", "bfloat16"] | None = None


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """Bytes of weights, cache and state."""

    model: tyro.conf.Positional[str]
    """A preset (kimi_linear_48b_a3b), a run file (.py), a run directory or a Hugging Face directory."""
    batch: int = 1
    """Sequences."""
    context: int = 131_072
    """Tokens of each."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights, attention cache and convolution histories."""
    mesh: str = ""
    """Sizes of mesh axes: fsdp=8,tensor=2."""
    plot: Path | None = None
    """Image file to draw bytes against context in."""


def parity(args: list[str]) -> None:
    options = tyro.cli(ParityOptions, args=args, prog="kda-jax eval parity")
    from kda_jax.parity import compare_logits, forward_logits

    reference = _arrays(options.reference, "tokens", "logits")
    model = _model(options.model, options.dtype, reference["tokens"])
    try:
        found = compare_logits(forward_logits(model, reference["tokens"]), reference["logits"])
    except ValueError as error:
        raise UserError(str(error)) from error
    print(found)
    if not found.kl_mean <= options.max_kl:
        raise UserError(
            f"the mean KL divergence {found.kl_mean:.3e} exceeds {options.max_kl:g}; `kda-jax eval layers` finds where they part"
        )


def layers(args: list[str]) -> None:
    options = tyro.cli(LayersOptions, args=args, prog="kda-jax eval layers")
    import numpy as np

    from kda_jax.parity import activations, compare_activations

    if (options.reference is None) == (options.out is None):
        raise UserError("give --reference to compare with, or --out to write to")
    reference = {} if options.reference is None else _arrays(options.reference, *([] if options.tokens else ["tokens"]))
    tokens = np.array([_ids(options.tokens)]) if options.tokens else reference.get("tokens")
    if tokens is None:
        raise UserError("give --tokens, the ids to run, separated by commas")
    found = activations(_model(options.model, options.dtype, tokens), tokens)
    if options.out is not None:
        np.savez(options.out, tokens=tokens, **found)
        print(f"{options.out}: {len(found)} outputs of {tokens.shape[0]} x {tokens.shape[1]} tokens")
        return
    try:
        differences = compare_activations(found, reference)
    except ValueError as error:
        raise UserError(str(error)) from error
    for name, error in differences:
        print(f"{error:9.2e}  {name}")
    first = next((d for d in differences if not d.error <= options.tolerance), None)
    if first is not None:
        raise UserError(f"{first.name} is the first that differs by more than {options.tolerance:g}: rms {first.error:.2e}")
    print(f"all {len(differences)} outputs agree to {options.tolerance:g}")


def memory(args: list[str]) -> None:
    options = tyro.cli(MemoryOptions, args=args, prog="kda-jax memory")
    from rich.console import Console
    from rich.table import Table

    from kda_jax import memory as report

    if options.batch < 1 or options.context < 1:
        raise UserError(f"--batch and --context must be at least 1, got {options.batch} and {options.context}")
    config = _config(options.model)
    try:
        mesh = report.mesh_of(options.mesh)
    except ValueError as error:
        raise UserError(f"--mesh: {error}") from error
    found = report.memory(config, batch=options.batch, context=options.context, dtype=options.dtype, mesh=mesh)
    title = f"{options.model}: {found.parameters:,} parameters, {options.dtype}, batch {options.batch}, on {mesh}"
    table = Table(title=title)
    for name, justify in (("", "left"), ("bytes", "right"), ("GB", "right"), ("GB per device", "right")):
        table.add_column(name, justify=justify)
    for row in (*found.rows, found.total):
        table.add_row(row.name, f"{row.total:,}", f"{row.total / 1e9:.3f}", f"{row.device / 1e9:.3f}", end_section=row == found.rows[-1])
    console = Console()
    console.print(table)
    for line in report.sentences(config, found, options.context, options.dtype):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.plot is not None:
        report.plot(config, options.plot, batch=options.batch, dtype=options.dtype)
        print(options.plot)


def _config(name: str) -> Any:
    """The model configuration that a preset, a run file or a directory stands for."""
    from kda_jax import hf
    from kda_jax.checkpoint import read_run_config
    from kda_jax.config import load_config_file
    from kda_jax.models import presets

    known = [n for n, f in vars(presets).items() if callable(f) and getattr(f, "__module__", "") == presets.__name__]
    path = Path(name)
    if name in known:
        return getattr(presets, name)()
    if path.suffix == ".py":
        return load_config_file(path).model
    if any(path.glob("*.safetensors*")):
        return hf.inspect(path).config
    if path.is_dir():
        return read_run_config(path).model
    raise UserError(f"{name} is no preset, file or directory{nearest(name, known)}; presets: {', '.join(known)}")


def _model(path: Path, dtype: str | None, tokens: Any) -> Any:
    import jax.numpy as jnp

    import kda_jax

    model = kda_jax.load(path, dtype=None if dtype is None else jnp.dtype(dtype))
    if tokens.ndim != 2 or tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise UserError(f"tokens must be [B, T] ids in 0..{model.config.vocab_size - 1}, got shape {tokens.shape}")
    return model


def _arrays(path: Path, *names: str) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as npz ({error})") from error
    absent = [name for name in names if name not in found]
    if absent:
        raise UserError(f"{path} has no {' and no '.join(absent)}; it has {', '.join(list(found)[:8])}")
    return found


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--tokens must be numbers separated by commas, got {text!r}") from error
