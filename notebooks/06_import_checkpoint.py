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
# # A checkpoint in, a checkpoint out
#
# Kimi K3's release is 1.56 TB in 96 files. A model of the same kind with 380 thousand parameters has the same names, the same layouts and
# the same packed experts, so everything about importing can be seen on it: make a checkpoint, look inside, load it, change it, write it.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax"], check=True)

# %%
import collections
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

import kda_jax
from kda_jax import hf, models
from kda_jax.hf.mxfp4 import unpack
from kda_jax.models import presets
from kda_jax.parity import compare_logits, forward_logits

print(f"kda_jax {kda_jax.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")

# %% tags=["parameters"]
config = presets.tiny_k3()

# %% [markdown]
# ## The release, from its shapes alone
#
# The table of names is code; nothing is downloaded and nothing is allocated.

# %%
by_dtype = collections.Counter()
released = list(hf.released(presets.kimi_k3()))
for tensor in released:
    by_dtype[tensor.dtype.name] += tensor.nbytes
print(f"{len(released):,} tensors of text, {sum(t.parameters for t in released):,} parameters")
print({name: f"{size / 1e9:,.1f} GB" for name, size in by_dtype.items()})
assert sum(t.parameters for t in released) == 2_779_484_478_208
assert by_dtype["uint8"] > 0.9 * by_dtype.total()  # the routed experts, packed to 4.25 bits a number

# %% [markdown]
# ## Make a small one

# %%
folder = pathlib.Path(tempfile.mkdtemp())
model = models.build(config, nnx.Rngs(0))
hf.save(model, folder / "plain")
print(*sorted(path.name for path in (folder / "plain").iterdir()))
tensors = load_file(folder / "plain" / "model.safetensors")
for name in list(tensors)[:8]:
    print(f"{name:62} {tensors[name].shape}")

# %% [markdown]
# ## Pack the experts as the release does
#
# MXFP4: two 4-bit numbers to a byte, the low half first, and one power of two for 32 of them. Here the bytes are random; what they stand
# for is read back exactly in bfloat16.

# %%
print(unpack(np.full((1, 16), 0x2B, np.uint8), np.full((1, 1), 126, np.uint8))[0, :2])
assert unpack(np.full((1, 16), 0x2B, np.uint8), np.full((1, 1), 126, np.uint8))[0, :2].tolist() == [-0.75, 0.5]

rng, packed = np.random.default_rng(0), {}
for name, x in tensors.items():
    if ".experts." in name:
        rows, columns = x.shape
        packed[f"{name}_packed"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        packed[f"{name}_scale"] = rng.integers(118, 122, (rows, columns // 32)).astype(np.uint8)
    else:
        packed[name] = x
(folder / "packed").mkdir()
save_file(packed, folder / "packed" / "model.safetensors")
(folder / "packed" / "config.json").write_text((folder / "plain" / "config.json").read_text())

# %% [markdown]
# ## Load it
#
# The check goes both ways before anything is read: every tensor is used or ignored by name, every parameter is filled.

# %%
found = hf.inspect(folder / "packed")
print(f"{len(found.tensors)} tensors used, {len(found.ignored)} ignored; {type(found.config).__name__}")
imported = kda_jax.load(folder / "packed")
experts = imported.stack.layer(1).block_sparse_moe.experts
print("w1 of layer 1:", experts.w1[...].shape, experts.w1[...].dtype, "- [experts, in, out]")
name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
assert jnp.array_equal(experts.w1[0], unpack(packed[f"{name}_packed"], packed[f"{name}_scale"]).T)

A_log = packed["language_model.model.layers.0.self_attn.A_log"]
print("A_log on disk", A_log.shape, "and here", imported.stack.layer(0).self_attn.A_log[...].shape, "- one per head, zeros behind")
assert A_log.shape[0] > config.linear_attn_config.num_heads

# %% [markdown]
# ## What a mistake looks like
#
# All of them at once, and nothing is written.

# %%
broken = dict(packed)
del broken["language_model.model.norm.weight"]
broken["language_model.model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
(folder / "broken").mkdir()
save_file(broken, folder / "broken" / "model.safetensors")
settings = json.loads((folder / "plain" / "config.json").read_text())
settings["text_config"]["attn_res_blok_size"] = 4
(folder / "broken" / "config.json").write_text(json.dumps(settings))
problems = ()
try:
    hf.load(folder / "broken")
except hf.BadCheckpoint as error:
    print(error)
    problems = error.problems
assert len(problems) == 3

# %% [markdown]
# ## Write it back
#
# What was packed is packed again and means the same; a reader sees the same numbers, and so the same logits.

# %%
hf.save(imported, folder / "back", experts="mxfp4")
again = kda_jax.load(folder / "back")
same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), nnx.to_pure_dict(nnx.state(imported)), nnx.to_pure_dict(nnx.state(again)))
assert all(jax.tree.leaves(same))
text = np.array([[1, 2, 3, 5, 8, 13]])
parity = compare_logits(forward_logits(again, text), forward_logits(imported, text))
print(parity)
assert (parity.top1, parity.max_error) == (1.0, 0.0)
