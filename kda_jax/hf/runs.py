"""Checkpoints from Hugging Face form to run directories and back: what the command line does."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import kda_jax
from kda_jax.checkpoint import Checkpoints, load_run, write_json
from kda_jax.config import RunConfig, TrainConfig, to_dict
from kda_jax.hf.load import inspect, load
from kda_jax.hf.save import Partial, refuse_occupied, save
from kda_jax.hf.text import tokenizer_of
from kda_jax.train.state import TrainState, flatten, split


def import_run(directory: str | Path, run_dir: str | Path, say: Callable[[str], None] = print) -> None:
    """Make a run directory, at step 0 and without optimizer state, of a checkpoint in Hugging Face form.

    Raises:
        BadCheckpoint: as `load`. UserError: `run_dir` is not empty. Nothing is written then.
    """
    run_dir = Path(run_dir)
    refuse_occupied(run_dir)
    checkpoint = inspect(directory)
    narrow = {str(tensor.dtype) for tensor in checkpoint.tensors.values()} - {"float32", "float64"}
    config = RunConfig(
        name=run_dir.absolute().name,
        model=checkpoint.config,
        data=tokenizer_of(directory, checkpoint.config.vocab_size),
        train=TrainConfig(compute_dtype="bfloat16" if narrow == {"bfloat16"} else "float32"),
    )
    params = load(directory, dtype=jnp.float32).params  # a run directory holds float32 masters
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # and so of what a cast leaves alone
    _, params, buffers = split(nnx.merge(checkpoint.graphdef, params))
    meta = {
        "step": 0,
        "examples": 0,
        "tokens": None,
        "config": to_dict(config),
        "versions": {"kda_jax": kda_jax.__version__, "jax": jax.__version__},
    }
    with Partial(run_dir) as partial:
        checkpoints = Checkpoints(partial, keep=1, on_failure="stop", say=say)
        checkpoints.save(TrainState(params, buffers, {}, jnp.zeros((), jnp.int32)), meta, None)
        checkpoints.close()
        write_json(partial / "config.json", to_dict(config))
    say(f"{len(checkpoint.tensors):,} tensors used, {len(checkpoint.ignored)} ignored{_listed(checkpoint.ignored)}")
    size = sum(leaf.size for leaf in flatten(params).values()) + sum(leaf.size for leaf in flatten(buffers).values())
    say(f"{type(checkpoint.config).__name__}: {size:,} parameters in {run_dir}")


def export_run(
    run_dir: str | Path,
    directory: str | Path,
    *,
    dtype: str | None = None,
    experts: Literal["plain", "mxfp4"] = "plain",
    say: Callable[[str], None] = print,
) -> None:
    """Write the newest checkpoint of a run as `save` does.

    Raises:
        UserError: as `load_run` and `save`; nothing is written then.
    """
    refuse_occupied(Path(directory))
    run = load_run(run_dir, say=say)
    save(run.model, directory, dtype=dtype, experts=experts)
    say(f"{directory}: step {run.step} of {run.config.name}")


def _listed(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
