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
# # What a hybrid remembers
#
# GPT-2 keeps the key and value of every token: memory and time per token grow with the text. A KDA layer keeps a state of fixed size.
# Kimi Linear puts one attention layer after every three KDA layers, and its attention layers keep only a small latent per token.
# This notebook counts the bytes, measures the time, and shows what a cache that is a *value* is good for.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax"], check=True)

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import kda_jax
from kda_jax import models
from kda_jax.memory import memory, saving
from kda_jax.models import GPT2Config, LinearLMConfig, presets

print(f"kda_jax {kda_jax.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")

# %% tags=["parameters"]
contexts = 1024, 4096, 16384, 65536
layers, width, repeats = 4, 128, 20

# %% [markdown]
# ## Bytes, by arithmetic
#
# Nothing is allocated: the counts are read off the shapes of the released models.

# %%
gpt2, kimi, k3 = presets.gpt2_124m(), presets.kimi_linear_48b_a3b(), presets.kimi_k3()
for name, config in (("GPT-2", gpt2), ("Kimi Linear 48B", kimi), ("Kimi K3", k3)):
    found = memory(config)
    print(f"{name:16} {found.cache_bytes_per_token:7,} B per token, {found.state_bytes / 1e6:6.1f} MB of states per sequence")
assert [memory(c).cache_bytes_per_token for c in (gpt2, kimi, k3)] == [36_864, 8_064, 27_648]
assert memory(kimi).state_bytes == 20 * 32 * 128 * 128 * 4  # 20 layers, 32 heads, a 128 x 128 state in float32

s = saving(kimi)
print(f"{s.attention_layers} of {s.layers} layers keep tokens: {s.share:.1%} less cache than with attention everywhere")
print(f"the states are worth {s.crossover_cache:,} tokens of it; below {s.crossover_saved:,} tokens attention everywhere would be smaller")
assert round(s.share, 3) == 0.741

# %%
n = np.geomspace(256, 2**20, 60)
cache = memory(kimi)
hybrid = cache.state_bytes + cache.conv_bytes + n * cache.cache_bytes_per_token
everywhere = n * s.all_attention_bytes_per_token
weights = sum(row.total for row in cache.rows if row.name.startswith("weights"))
plt.loglog(n, hybrid, label="Kimi Linear: states and cache")
plt.loglog(n, everywhere, label="27 attention layers")
plt.axhline(weights, color="black", linestyle="--", label="weights")
plt.axvline(s.crossover_saved, color="grey", linewidth=0.8)
plt.xlabel("context, tokens")
plt.ylabel("bytes of one sequence")
plt.legend()
plt.show()
assert hybrid[0] > everywhere[0]  # a short text is cheaper with attention everywhere
assert hybrid[-1] < 0.27 * everywhere[-1]

# %% [markdown]
# The saving is in the cache alone. The weights do not shrink: for one short text they are nearly everything; the hybrid pays where many
# sequences, or long ones, share them.

# %%
for batch, context in ((1, 4096), (1, 2**20), (64, 2**17)):
    per_sequence = cache.state_bytes + cache.conv_bytes + context * cache.cache_bytes_per_token
    whole, other = weights + batch * per_sequence, weights + batch * context * s.all_attention_bytes_per_token
    print(
        f"batch {batch:3}, context {context:9,}: {whole / 1e9:7.1f} GB against {other / 1e9:7.1f} GB, {1 - whole / other:6.1%} less in all"
    )

# %% [markdown]
# ## Time per token, measured
#
# One decoding step after contexts of different lengths, of a stack of KDA layers and of GPT-2 of the same width. A step is one compiled
# program; the KDA stack's does the same work whatever has been read.

# %%
heads = width // 32
sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_heads": heads, "head_dim": 32, "intermediate_size": 2 * width}
kda = LinearLMConfig(mixer="kda", vocab_size=256, **sizes)
attention = GPT2Config(vocab_size=256, n_positions=max(contexts) + 8, n_embd=width, n_layer=layers, n_head=heads)
step = jax.jit(lambda model, token, cache: model(token, cache=cache))


def seconds_per_token(config, context):
    """Processor time of a step, with a cache that says that it has read `context` tokens; what they were changes no timing."""
    model = models.build(config, nnx.Rngs(0))
    cache = model.init_cache(1, context + 8)
    read = lambda path, x: x + context if path[-1] == jax.tree_util.GetAttrKey("length") else x
    cache = jax.tree_util.tree_map_with_path(read, cache)
    token = jnp.zeros((1, 1), jnp.int32)
    jax.block_until_ready(step(model, token, cache))
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(5):
            jax.block_until_ready(step(model, token, cache).logits)
        best = min(best, (time.process_time() - begin) / 5)
    return best


times = {name: [seconds_per_token(config, c) for c in contexts] for name, config in (("KDA", kda), ("attention", attention))}
for name, values in times.items():
    print(f"{name:10}", *(f"{1e3 * v:8.2f} ms" for v in values))
    plt.loglog(contexts, values, marker="o", label=name)
plt.xlabel("context, tokens")
plt.ylabel("seconds of processor time per token")
plt.legend()
plt.show()
assert times["attention"][-1] / times["attention"][0] > 1.5 * times["KDA"][-1] / times["KDA"][0]

# %% [markdown]
# ## A cache is a value
#
# A forward takes a cache and returns the next one; the old one is still there. So a snapshot is a reference, going back is using the
# old one, and rows can be taken, put and emptied. Here: read a text in two pieces, and go on from the middle twice.

# %%
model = models.build(presets.tiny_hybrid(), nnx.Rngs(0))
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 24)), jnp.int32)
whole = model(tokens).logits
first = model(tokens[:, :10], cache=model.init_cache(1, 64))
snapshot = first.cache
once = model(tokens[:, 10:], cache=snapshot)
detour = model(tokens[:, :5], cache=snapshot)  # something else, and back
again = model(tokens[:, 10:], cache=snapshot)
assert jnp.array_equal(once.logits, again.logits)
assert jnp.abs(once.logits - whole[:, 10:]).max() < 1e-4 * jnp.abs(whole).max()
print(f"after 10 tokens the cache holds {sum(leaf.nbytes for leaf in jax.tree.leaves(snapshot)):,} bytes")
print("two continuations from one snapshot are equal to the bit, and equal the text read in one go")
