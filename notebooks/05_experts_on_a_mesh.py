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
# # Experts on a mesh
#
# Kimi Linear has 256 experts a layer and sends each token to 8 of them. No chip holds them all, so the experts are spread over devices and
# the tokens travel. This notebook does it on eight fake devices of a CPU: where the weights lie, where the tokens go, how many bytes move,
# and that the numbers are those of one device, gradients included.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax"], check=True)
os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from kda_jax import layers, sharding
from kda_jax.models.placement import axes, gathered, place
from kda_jax.ops import Routing, limit
from kda_jax.sharding import MeshConfig, make_mesh

assert jax.device_count() == 8

# %% tags=["parameters"]
rows, tokens, width, ffn = 8, 64, 32, 16
num_experts, top_k = 16, 2

# %% [markdown]
# ## Names first, devices later
#
# A layer knows nothing of devices. Its parameters carry *logical* names for their axes, and one table says which mesh axes may split an
# axis of that name. Change the mesh and the layer stays as it is.

# %%
moe = layers.MoE(hidden_size=width, intermediate_size=ffn, num_experts=num_experts, num_experts_per_token=top_k, rngs=nnx.Rngs(0))
for name, rule in sharding.PARAMETERS.items():
    print(f"{name:8} -> {' then '.join(rule) or 'whole'}")

# %%
mesh = make_mesh(MeshConfig(expert=4, fsdp=2))
moe_on_mesh = place(moe, mesh)
for (path, names), x in zip(axes(moe).items(), jax.tree.leaves(nnx.state(moe_on_mesh)), strict=True):
    print(f"{path:28} {x.shape!s:14} {names!s:28} {x.sharding.spec}")

# %% [markdown]
# ## Where the weights lie
#
# `w1` is [experts, width, ffn]. Its experts are split over `expert`, its width over `fsdp`: each device stores an eighth. Before a product,
# the two halves of the width are gathered, and the gradient is summed straight back into halves.


# %%
def draw(ax, x, title):
    """The first two axes of `x`, coloured by the device that holds each part."""
    for shard in x.addressable_shards:
        (e0, e1, _), (d0, d1, _) = (part.indices(n) for part, n in zip(shard.index[:2], x.shape[:2], strict=True))
        ax.add_patch(plt.Rectangle((d0, e0), d1 - d0, e1 - e0, color=plt.cm.tab10(shard.device.id), ec="white"))
        ax.text((d0 + d1) / 2, (e0 + e1) / 2, shard.device.id, ha="center", va="center", color="white")
    ax.set(xlim=(0, x.shape[1]), ylim=(x.shape[0], 0), xlabel="width", ylabel="expert", title=title)


figure, both = plt.subplots(1, 2, figsize=(8, 3))
draw(both[0], moe_on_mesh.experts.w1[...], "w1 on expert 4 x fsdp 2")
draw(both[1], place(moe, make_mesh(MeshConfig(expert=2, tensor=4))).experts.w1[...], "w1 on expert 2 x tensor 4")
figure.tight_layout()
assert all(shard.data.size == moe.experts.w1[...].size // 8 for shard in moe_on_mesh.experts.w1[...].addressable_shards)

# %% [markdown]
# On the right four devices share a label place: `tensor` splits the ffn axis, which points into the page.
#
# ## Where the tokens go
#
# Rows are split over `fsdp` and `expert` alike: a device has its own tokens *and* its own experts. Every token asks for `top_k` experts,
# so every device sends to every other one. The matrix below is that traffic: row = sender, column = owner of the expert.

# %%
x = jax.random.normal(jax.random.key(1), (rows, tokens, width))
routing = moe.gate(x)
owner = np.asarray(routing.experts).reshape(8, -1) // (num_experts // 4)  # of each device's tokens, the quarter that holds their experts
traffic = np.stack([np.bincount(device, minlength=4) for device in owner])
plt.figure(figsize=(4, 3))
plt.imshow(traffic)
plt.colorbar(label="rows sent")
plt.xlabel("owner along `expert`")
plt.ylabel("sender")
print(f"{traffic.sum()} rows = {rows} x {tokens} tokens x {top_k} experts")
assert traffic.sum() == rows * tokens * top_k

# %% [markdown]
# How many rows come is known only when the router has spoken. TPUs and GPUs have a *ragged* all-to-all that moves just those rows; a CPU
# moves slots of fixed size with the same contents. Either way nobody is dropped: an owner has room for all that could come.
#
# ## The same numbers
#
# One forward on one device, one on the mesh, and the gradients of both.


# %%
def loss(moe, x):
    out = gathered(moe)(x)
    return jnp.sum(jnp.sin(out.y)), out


run = jax.jit(jax.value_and_grad(loss, has_aux=True))
(_, one), one_gradient = run(moe, x)
with jax.set_mesh(mesh):
    (_, many), gradient = run(moe_on_mesh, sharding.put_rows(np.asarray(x)))
pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(one_gradient), strict=True)
worst = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
print(f"output differs by {np.abs(np.asarray(many.y) - np.asarray(one.y)).max():.1e}, gradients by {worst:.1e}")
print("gradient of w1 lies like w1:", gradient.experts.w1[...].sharding.spec)
assert worst < 1e-4
np.testing.assert_array_equal(many.counts, one.counts)

# %% [markdown]
# The counts, which balance the router, are sums over all devices, and equal to the last token.
#
# ## Room for everybody, or a capacity
#
# Room for all that could come is the price of dropping nothing. A capacity limits each expert to `factor` times the mean load of a
# device's tokens; the buffers shrink, and what does not fit is dropped and counted. With an untrained router that is a lot; balancing
# brings it down.

# %%
factors = np.array([0.5, 0.75, 1.0, 1.5, 2.0, 3.0, num_experts / top_k])
flat = Routing(*(part.reshape(-1, top_k) for part in routing))
dropped = [int(limit(flat, num_experts, factor).dropped) / flat.experts.size for factor in factors]
plt.figure(figsize=(4, 3))
plt.plot(factors, dropped, marker="o")
plt.xlabel("capacity factor")
plt.ylabel("share of choices dropped")
assert dropped[-1] == 0

# %% [markdown]
# ## Auto and Explicit
#
# On an *auto* mesh the compiler propagates shardings, and `kda_jax` only says where it matters. On an *explicit* mesh a sharding is part
# of an array's type: `jax.typeof` shows it, and an operation that cannot tell how its result should lie is an error instead of a guess.
# The train step takes both (`--mesh.axis-type explicit`), with the same numbers.

# %%
explicit = make_mesh(MeshConfig(expert=4, fsdp=2, axis_type="explicit"))
with jax.set_mesh(explicit):
    there = place(moe, explicit)
    print("auto:    ", jax.typeof(moe_on_mesh.experts.w1[...]))
    print("explicit:", jax.typeof(there.experts.w1[...]))
    forward = sharding.automatic(lambda moe, x: gathered(moe)(x).y, jax.sharding.PartitionSpec())
    y = jax.jit(forward)(there, sharding.put_rows(np.asarray(x)))
print(f"explicit differs from one device by {np.abs(np.asarray(y) - np.asarray(one.y)).max():.1e}")
assert "@" in str(jax.typeof(there.experts.w1[...]))
np.testing.assert_allclose(y, one.y, atol=1e-5)

# %% [markdown]
# A whole model goes the same way: `kda-jax train --config configs/smoke.py --mesh.expert 4 --mesh.fsdp 2`.
