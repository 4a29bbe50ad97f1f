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
# # Plan a pod
#
# Will it fit, and what will it send? Both are decided when the program is compiled, and the compiler needs no TPU: libtpu compiles on a
# laptop for any slice, and fake CPU devices do for a first look. Nothing is allocated; the shapes and shardings are those of
# `kda-jax train`.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax[tpu]"], check=True)

# %%
import dataclasses

import matplotlib.pyplot as plt

from kda_jax.bench.plan import plan, told
from kda_jax.bench.slices import find, known
from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models import count, presets
from kda_jax.sharding import MeshConfig

has_libtpu = importlib.util.find_spec("libtpu") is not None
print(f"{len(known())} slices are known; {'libtpu is here' if has_libtpu else 'no libtpu: fake devices only'}")

# %% tags=["parameters"]
model = dataclasses.replace(presets.kimi_linear_tiny(), remat="full")
topology = "v5e:2x4" if has_libtpu else "cpu:8"
rows, seq_len = 16, 512
meshes = [MeshConfig(data=8), MeshConfig(fsdp=8), MeshConfig(fsdp=2, expert=4)]

# %% [markdown]
# ## Arithmetic first
#
# Adam keeps the parameters and two moments in float32, 12 bytes a parameter; Muon one, 8 bytes. Divided by the devices that store parts
# of them, that is the least that a device holds.

# %%
devices = find(topology).devices
sizes = count(model)
least = 8 * sizes.total / devices
print(f"{sizes.total:,} parameters, {sizes.active:,} active per token: at least {least / 2**20:.1f} MiB on each of {devices} devices")

# %% [markdown]
# ## The compiler's word
#
# One model, one batch, and three ways to lay them out. `data` copies everything; `fsdp` stores a part on each device and gathers a block
# when it runs; `expert` keeps the experts apart and sends the tokens to them.

# %%
config = RunConfig(
    "planned",
    model,
    data=DataConfig(seq_len=seq_len),
    optim=OptimConfig(algorithm="muon"),
    train=TrainConfig(batch_size=rows),
)
plans = {}
for mesh in meshes:
    run = dataclasses.replace(config, mesh=mesh)
    plans[str(mesh)] = found = plan(run, topology, "train", rows, seq_len)
    print(told(run, found))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
names = list(plans)


def stack(axes, parts):
    """Horizontal bars, one for each mesh, of `parts`: label -> MiB by mesh."""
    start = [0.0] * len(names)
    for label, sizes in parts.items():
        axes.barh(names, sizes, left=start, label=label)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    axes.legend()


def mib(read):
    return [read(found) / 2**20 for found in plans.values()]


stack(left, {"state and batch": mib(lambda p: p.argument_bytes), "temporaries": mib(lambda p: p.temporary_bytes)})
left.set_xlabel("MiB on a device")
kinds = sorted({kind for found in plans.values() for kind in found.collective_bytes})
stack(right, {kind: mib(lambda p, kind=kind: p.collective_bytes.get(kind, 0)) for kind in kinds})
right.set_xlabel("MiB that a device receives in a step")
plt.show()

# %% [markdown]
# Copies cost eight times the memory of parts, and parts cost traffic: that is the bargain, and the plan puts figures on it.

# %%
stored = {name: found.argument_bytes for name, found in plans.items()}
copied, parted = stored[str(meshes[0])], stored[str(meshes[1])]
assert parted < copied / 4
assert parted >= least
assert plans[str(meshes[1])].collective_bytes["all-gather"] > plans[str(meshes[0])].collective_bytes.get("all-gather", 0)
assert all(found.fits for found in plans.values())

# %% [markdown]
# ## The same for 48 billion parameters
#
#     kda-jax plan --config configs/kimi_linear_48b.py --topology v5p:4x4x4
#
# takes a few minutes and says whether Kimi Linear trains on 64 chips at a context of 8,192; the README has the table.
