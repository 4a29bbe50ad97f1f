"""What `kda-jax export` writes, loaded by transformers: the logits must be ours. Not a test, for it needs torch:

pip install -e ".[oracles]"
python tests/hf/check_export.py
"""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from kda_jax import hf, models, testing
from kda_jax.models import presets
from kda_jax.models.config import GPT2Config

TOLERANCE = 1e-5
CONFIGS = {
    "GPT-2": GPT2Config(vocab_size=61, n_positions=64, n_embd=24, n_layer=3, n_head=3),
    "Kimi Linear": dataclasses.replace(presets.tiny_hybrid(), vocab_size=67, initializer_range=0.1),
}


def differ(config) -> testing.Error:
    """Between our logits and those of transformers."""
    model = models.build(config, nnx.Rngs(1))
    noise = lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)  # no bias stays zero, no scale one
    nnx.update(model, jax.tree.map(lambda x: noise(x) if x.dtype == jnp.float32 else x, nnx.state(model)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 50))
    ours = np.asarray(model(jnp.asarray(tokens, jnp.int32)).logits)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(model, Path(folder) / "exported")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "exported", dtype=torch.float32)
    with torch.no_grad():
        theirs = theirs(torch.from_numpy(tokens)).logits.numpy()
    return testing.error(ours, theirs)


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        error = differ(config)
        print(f"{name}: {error}")
        assert error.rms <= TOLERANCE
