"""Third step of the ladder: DeltaNet, which writes the correction.

    kda-jax data
    kda-jax train --config configs/ladder/deltanet.py

3,614,912 parameters. Expected: 2.22 bits per byte, measured on an H200.
"""

import pathlib
import runpy

from kda_jax.models import LinearLMConfig

base = runpy.run_path(str(pathlib.Path(__file__).with_name("base.py")))
HIDDEN, LAYERS, HEADS, HEAD_DIM = (base[name] for name in ("HIDDEN", "LAYERS", "HEADS", "HEAD_DIM"))

model = LinearLMConfig(
    mixer="deltanet",
    vocab_size=256,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_heads=HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=512,
)
config = base["run"]("deltanet", model)
