# %% [markdown]
# # 8. Train a small model and look into it
#
# Everything so far comes together. We train a Hyena of two layers on the source code of Python's standard
# library, byte by byte, as `hyena-jax train quickstart` does with a larger one. Then we read what it writes,
# and open it: its losses token by token, its filters before and after, and the matrix it applies to a text.
#
# The text comes with Python, so nothing is downloaded. Another version of Python has another text, and the
# numbers below will differ a little.

# %%
import dataclasses
import math
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

import hyena_jax
from hyena_jax.inspect import mixing, trace
from hyena_jax.reference import filters, hyena, language_models
from hyena_jax.reference.convolution import toeplitz
from hyena_jax.reference.layers import dense
from hyena_jax.training.step import init_params

plt.style.use("tour.mplstyle")

# %% [markdown]
# ## The experiment
#
# A config says all about a run. We take that of `quickstart` and make it smaller. Every prediction is a
# probability for each of 256 bytes; the loss is $-\log p$ of the byte that really came, in *nats* (natural
# logarithm).

# %%
quickstart = hyena_jax.load_config("quickstart")
experiment = dataclasses.replace(
    quickstart,
    model=dataclasses.replace(quickstart.model, n_layers=2, d_model=64, d_ff=256),
    training=dataclasses.replace(quickstart.training, steps=400, eval_every=50, eval_windows=100),
)
folder = tempfile.TemporaryDirectory()
run = hyena_jax.train(experiment, folder.name, quiet=True)
losses = {row["step"]: row["validation/loss"] for row in run.metrics() if "validation/loss" in row}

n_params = sum(leaf.size for leaf in jax.tree.leaves(run.params))
print(f"{n_params:,} parameters")
print(f"validation loss {losses[50]:.2f} after 50 steps, {losses[400]:.2f} after 400")

# %% [markdown]
# Is that good? Compare with two guesses that need no network. Knowing only how frequent each byte is costs
# the *entropy* of the frequencies; knowing also the byte before, and how frequent each pair is, costs less.
# Both are counted on the held-out text itself, so no such guess from the training text could do better. A
# model below the second line has learned to use more than the last byte.


# %%
def entropy(counts):
    """-sum p log p, along the last axis, for p in proportion to the counts."""
    p = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


text = run.data.held_out[:1_000_000].astype(int)
pairs = np.bincount(256 * text[:-1] + text[1:], minlength=256**2).reshape(256, 256)
by_frequency = entropy(pairs.sum(axis=0))
by_last_byte = np.sum(entropy(pairs) * pairs.sum(axis=1)) / pairs.sum()

fig, ax = plt.subplots()
ax.plot(losses.keys(), losses.values(), "o-", label="model, on text that it has not seen")
ax.axhline(by_frequency, color="0.6", linestyle="--", label="knowing the frequency of each byte")
ax.axhline(by_last_byte, color="0.3", linestyle=":", label="knowing the byte before")
ax.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(1.6, 4.4))
ax.legend()

assert losses[400] < losses[200] < losses[50] < math.log(256)
assert losses[400] < by_last_byte < by_frequency

# %% [markdown]
# ## What it writes
#
# From the prompt `def `, byte by byte, each drawn from the predicted probabilities. First the model before
# training, then after.

# %%
untrained = dataclasses.replace(run, params=jax.tree.map(np.asarray, init_params(run.model, experiment.seed)))
for name, model_run in {"before": untrained, "after": run}.items():
    (sample,) = model_run.generate("def ", max_new_tokens=300, temperature=0.8, seed=0)
    print(f"--- {name} training")
    print(f"def {sample}" if name == "after" else ascii(f"def {sample[:60]}"))

# %% [markdown]
# Before training it is noise: most of it is not even text. After 400 steps it has the look of code: words,
# lines, indentation, brackets. It does not know what code means, and few of the words exist; that takes more
# layers, more data and more steps. (At a *temperature* of 0.8 the likely bytes are drawn more often than
# predicted.)
#
# ## The same model in NumPy
#
# There is no magic between the notebooks before and this one. The trained parameters, in the plain functions
# of [notebook 4](4_hyena.ipynb), give the same logits. Position $t$ predicts byte $t + 1$.

# %%
line = "for name in names:\n    print(name, len(name))\n"
tokens = np.array([list(line.encode())])
logits = language_models.hyena(run.params, tokens, run.experiment.model)
from_flax = run.model.apply({"params": run.params}, tokens)

assert np.allclose(logits, from_flax, atol=1e-3)

# %% [markdown]
# ## Where the loss is
#
# The loss of each byte of a small text. It is high where something new begins, a name or a bracket, for many
# things could come there. Within `name` it falls: after `nam` there is little choice. Once indentation has
# begun, each further space is almost free. But the model does not know when to stop: the first byte after the
# four spaces costs most of all, for it expected a fifth space.

# %%
log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
loss = -log_p[0, np.arange(len(line) - 1), tokens[0, 1:]]
labels = [{"\n": "↵", " ": "␣"}.get(character, character) for character in line]

fig, ax = plt.subplots(figsize=(8.4, 2.4))
ax.bar(range(1, len(line)), loss)
ax.set_xticks(range(len(line)), labels, fontsize=9, family="monospace")
ax.set(xlabel="byte", ylabel="loss (nats)", title="the loss of each byte; the first is not predicted")

of_byte = np.concatenate([[np.nan], loss])  # at the index of the byte itself
indent, name, after = line.index("    "), line.index("name"), line.index("print")
assert of_byte[indent + 1 : after].max() < 0.1 * loss.mean()  # further spaces
assert np.nanargmax(of_byte) == after
assert logits[0, after - 1].argmax() == ord(" ")  # it expected a fifth
assert of_byte[name + 3] < of_byte[name + 1] < of_byte[name]
assert np.isclose(np.exp(-loss[0]), jax.nn.softmax(from_flax[0, 0])[tokens[0, 1]], rtol=1e-3)

# %% [markdown]
# ## The filters, before and after
#
# Each layer has one implicit filter for each of 64 channels ([notebook 3](3_filters.ipynb)). The picture
# shows four of them, spread over the channels: channel 0 has the slowest window, channel 63 the fastest.

# %%
config = run.experiment.model
mixer_config, length = config.pattern[0], config.max_len


def filters_of(params, block):
    """The filters [D, L] of a layer."""
    own = params[f"blocks_{block}"]["mixer"]["filter"]
    return filters.implicit(own, 1, length, length, mixer_config.filter)[0]


fig, axes = plt.subplots(2, 2, figsize=(8, 4), sharex=True, sharey="row")
for block in range(2):
    for column, (when, params) in enumerate({"before": untrained.params, "after": run.params}.items()):
        h = filters_of(params, block)
        for channel in (0, 20, 40, 63):
            axes[block, column].plot(h[channel], linewidth=1, label=f"channel {channel}")
        axes[block, column].set_title(f"layer {block + 1}, {when} training")
for ax in axes[1]:
    ax.set_xlabel("lag s")
for ax in axes[:, 0]:
    ax.set_ylabel("$h_s$")
axes[0, 0].legend()

changes = [
    np.linalg.norm(filters_of(run.params, block) - filters_of(untrained.params, block))
    / np.linalg.norm(filters_of(untrained.params, block))
    for block in range(2)
]
print("the filters changed by", " and ".join(f"{change:.0%}" for change in changes), "of their size")
rates = np.abs(filters.decay_rates(mixer_config.filter, config.d_model))
assert min(changes) > 0.1
assert (np.diff(rates) > 0).all()

# %% [markdown]
# ## The matrix that it applies to this text
#
# This is Hyena in its published form ([notebook 4](4_hyena.ipynb)): the signal $v$ is gated first, then
# convolved, then gated again. For one channel,
#
# $$y = x_0 \odot \big(h * (x_1 \odot v) + b \; x_1 \odot v\big) = M v, \qquad
#   M = D_0\,(S_h + b I)\,D_1,$$
#
# with $D_0$, $D_1$ the diagonal matrices of the gates. `trace` gives the input of each layer. We compute $M$
# for every channel and both layers, and check that these matrices are the layer.

# %%
seen = trace(run.model, run.params, tokens)
n_bytes = len(line)
matrices = []  # [D, L, L] of each layer
for block, layer in enumerate(seen.layers):
    params = run.params[f"blocks_{block}"]["mixer"]
    x_0, x_1, v = (part[0] for part in hyena.projections(params, layer.inputs, 3))  # [D, L]
    h, b = filters_of(run.params, block)[:, :n_bytes], params["skip"][0]
    of_layer = []
    for d in range(config.d_model):
        D_0, S_h, D_1 = np.diag(x_0[d]), toeplitz(h[d]), np.diag(x_1[d])
        of_layer.append(D_0 @ (S_h + b[d] * np.eye(n_bytes)) @ D_1)
    matrices.append(np.stack(of_layer))
    y = np.stack([M @ v[d] for d, M in enumerate(of_layer)])
    expected = hyena.hyena(
        mixer_config, params, layer.inputs, length, np.zeros(tokens.shape), filters.implicit
    )
    assert np.allclose(dense(params["out_proj"], y.T[None]), expected)

# %% [markdown]
# `hyena_jax.inspect` finds such matrices for most mixers of the package, from the Flax modules. Here they are
# ours:

# %%
for layer, ours in zip(seen.layers, matrices, strict=True):
    found = mixing(layer.mixer, layer.own(run.params), layer.inputs)
    assert np.allclose(found.matrices[0], ours, atol=1e-3 * np.abs(ours).max())

# %% [markdown]
# The picture shows the size of the entries, as the root mean square over the channels: what each byte (row)
# takes from which earlier byte (column).

# %%
sizes = [np.sqrt(np.square(of_layer).mean(axis=0)) for of_layer in matrices]
fig, axes = plt.subplots(2, 1, figsize=(8, 14.4), layout="compressed")
for number, (ax, size) in enumerate(zip(axes, sizes, strict=True), 1):
    past = np.tril(size, -1)
    shown = past / np.maximum(past.max(axis=1, keepdims=True), 1e-12)
    image = ax.imshow(shown, vmin=0, vmax=1, cmap="Greys", aspect="equal")
    ax.set_xticks(range(n_bytes), labels, fontsize=9, family="monospace")
    ax.set_yticks(range(n_bytes), labels, fontsize=9, family="monospace")
    ax.set(title=f"layer {number}: size of M, each row divided by its largest entry")
    ax.set(xlabel="takes from", ylabel="byte")
    read = [shown[s + 2 : s + 12, s].mean() for s in range(n_bytes - 12)]
    most = int(np.argmax(read))
    print(f"layer {number}: the bytes 2 to 11 later take most from column {most}, {labels[most]!r}")
    assert (np.triu(size, 1) == 0).all()
fig.colorbar(image, ax=axes, shrink=0.5, label="size, relative to the row's largest")

# %% [markdown]
# Only the past is shown: the diagonal, each byte's own path, would outshine it. Most of what a byte takes
# comes from the bytes just before it. Where a column is darker than its neighbours, many later bytes read
# that one; where a row is dark far to the left, that byte looks back far. (The printed lines name a dark
# column of each layer; column 0 is the first.)
#
# ## Where to go from here
#
# - `hyena-jax show RUN --text TEXT` writes a page of such pictures, and more, about any run.
# - `hyena-jax train quickstart --workdir runs/quickstart` trains the larger one.
# - Give the model `pattern=(HawkConfig(),)`, and the first half of this notebook trains Hawk; its logits in
#   NumPy are `language_models.hawk`.
# - The [mixers' page](../../hyena_jax/mixers/README.md) lists everything that can stand in that place.

# %%
folder.cleanup()
