"""First step of the ladder: GPT-2, which keeps every token in a cache.

    kda-jax data
    kda-jax train --config configs/ladder/gpt2.py

3,657,600 parameters. About ten minutes on two CPU cores (measured to step 80). Expected: 3.21 bits per byte, measured on an H200.
"""

import pathlib
import runpy

from kda_jax.models import GPT2Config

base = runpy.run_path(str(pathlib.Path(__file__).with_name("base.py")))
HIDDEN, LAYERS, HEADS, HEAD_DIM = (base[name] for name in ("HIDDEN", "LAYERS", "HEADS", "HEAD_DIM"))

model = GPT2Config(vocab_size=256, n_positions=256, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
config = base["run"]("gpt2", model)
