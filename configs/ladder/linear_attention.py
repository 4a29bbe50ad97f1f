"""Second step of the ladder: linear attention, a sum of fixed size.

    kda-jax data
    kda-jax train --config configs/ladder/linear_attention.py

3,591,872 parameters. Expected: 3.61 bits per byte, measured on an H200:
a sum without decay or convolution does not know the order of what it holds.
"""

import pathlib
import runpy

from kda_jax.models import LinearLMConfig

base = runpy.run_path(str(pathlib.Path(__file__).with_name("base.py")))
HIDDEN, LAYERS, HEADS, HEAD_DIM = (base[name] for name in ("HIDDEN", "LAYERS", "HEADS", "HEAD_DIM"))

model = LinearLMConfig(
    mixer="linear_attention",
    vocab_size=256,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_heads=HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=512,
)
config = base["run"]("linear_attention", model)
