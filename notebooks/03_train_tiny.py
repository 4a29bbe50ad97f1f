# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a tiny Kimi Linear
#
# Three KDA layers for one MLA layer, a mixture of experts in every layer but the first, bytes as tokens. Train it, stop it half-way,
# go on from the checkpoint, and let it write. The same `train` runs on a laptop's CPU, a GPU or a TPU.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax"], check=True)

# %%
import json
import math
import pathlib
import shutil
import tempfile

import jax
import matplotlib.pyplot as plt

import kda_jax
from kda_jax import generate
from kda_jax.checkpoint import load_run, step_directories
from kda_jax.config import CheckpointConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import count, presets
from kda_jax.tokenizer import build
from kda_jax.train.loop import train

print(f"kda_jax {kda_jax.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")

# %% tags=["parameters"]
source = None  # a directory of .txt files; None writes a small text to learn from
model = presets.kimi_linear_tiny()
steps, batch_size, seq_len = 200, 8, 256
new_tokens = 200

# %% [markdown]
# ## The run is one value

# %%
directory = pathlib.Path(tempfile.mkdtemp())
if source is None:
    source = directory / "text"
    source.mkdir()
    verbs, things = ["keeps", "corrects", "forgets", "reads"], ["a sum", "one row", "every key", "the last value", "what it wrote"]
    for page in range(24):
        lines = (f"The state {verbs[(i * page) % 4]} {things[(i + 3 * page) % 5]}." for i in range(200))
        (source / f"{page}.txt").write_text("\n".join(lines))

config = RunConfig(
    name="tiny",
    model=model,
    data=DataConfig(source=(str(source),), seq_len=seq_len, validation_fraction=0.1),
    optim=OptimConfig(learning_rate=3e-3, warmup_steps=max(2, steps // 20)),
    train=TrainConfig(steps=steps, batch_size=batch_size, log_every=max(1, steps // 20)),
    eval=EvalConfig(every=max(1, steps // 4), rows=16, final_rows=32),
    checkpoint=CheckpointConfig(every=max(1, steps // 4), keep=8),
)
sizes = count(model)
print(f"{sizes.total:,} parameters, {sizes.active:,} active per token")

# %% [markdown]
# ## Train

# %%
result = train(config, directory / "run")


def losses(run_dir):
    """step -> training loss, from the run's JSONL metrics."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


curve = losses(directory / "run")
plt.plot(list(curve), [loss / math.log(2) for loss in curve.values()])
plt.xlabel("step")
plt.ylabel("training loss, bits per byte")
plt.show()
print(f"validation: {result.evaluation.bits_per_byte:.2f} bits per byte")
assert curve[max(curve)] < 0.8 * curve[min(curve)]

# %% [markdown]
# ## Stop and go on
#
# Suppose the power had failed half-way: only the checkpoints up to there are on disk. The same call in that directory goes on from the
# newest of them, and every loss from there on is the same to the last bit, because a step is a function of the state before it and of
# the batch with its number.

# %%
shutil.copytree(directory / "run", directory / "resumed")
for checkpoint in step_directories(directory / "resumed"):
    if int(checkpoint.name) > steps // 2:
        shutil.rmtree(checkpoint)
train(config, directory / "resumed")
assert losses(directory / "resumed") == curve
print("the resumed run repeats the other one bit for bit")

# %% [markdown]
# ## Let it write
#
# The prompt is prefilled in one go; then every token is one step of the same forward pass. KDA layers carry a state of fixed size, MLA
# layers a latent of a few numbers per token.

# %%
run = load_run(directory / "run")
tokenizer = build(run.config.data.tokenizer, run.config.data.vocabulary)
sampling = generate.Sampling(max_new_tokens=new_tokens, temperature=0.7)
prompt = "The state "
text = generate.generate_text(run.model, tokenizer, [prompt], sampling)[0]
print(prompt + text)
assert text
assert text == generate.generate_text(run.model, tokenizer, [prompt], sampling)[0]  # the seed decides
