# %% [markdown]
# # 10. Train a small model, look into it, and ask it to recall
#
# Everything so far comes together. We train a Hyena of two layers on the source code of Python's standard
# library, byte by byte, as `hyena-jax train quickstart` does with a larger one. Then we read what it writes,
# and open it: its losses token by token, its filters before and after, and the matrix it applies to a text.
# At last Hyena meets attention, on two tasks of recall. All of it takes two to three minutes on two cores.
#
# The text comes with Python, so nothing is downloaded. Another version of Python has another text, and the
# numbers below will differ a little.

# %%
import dataclasses
import tempfile

import jax
import numpy as np
import show
from loops import toeplitz

import hyena_jax
from hyena_jax.config import AttentionConfig, GatedDeltaConfig, HyenaConfig
from hyena_jax.data.tasks import load_task
from hyena_jax.inspect import mixing, trace
from hyena_jax.mixers import mixer_oracle
from hyena_jax.reference import filters
from hyena_jax.reference.hyena import projections
from hyena_jax.reference.models import language_model
from hyena_jax.training.step import init_params


def train(experiment, metric):
    """The run of an experiment, in a folder that is deleted, and a metric of its evaluations by step."""
    with tempfile.TemporaryDirectory() as folder:
        run = hyena_jax.train(experiment, folder, quiet=True)
        rows = [row for row in run.metrics() if f"validation/{metric}" in row]
    return run, {row["step"]: row[f"validation/{metric}"] for row in rows}


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
run, losses = train(experiment, "loss")

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

curves = {"model, on text that it has not seen": list(losses.values())}
curves |= {"knowing the frequency of each byte": by_frequency, "knowing the byte before": by_last_byte}
labels = {"xlabel": "step", "ylabel": "loss (nats per byte)", "ylim": (1.6, 4.4)}
show.lines(curves, list(losses), ("o-", "--", ":"), **labels)

# %% [markdown]
# ## What it writes
#
# From the prompt `def `, byte by byte, each drawn from the predicted probabilities. First the model before
# training, then after.

# %%
untrained = dataclasses.replace(run, params=jax.tree.map(np.asarray, init_params(run.model, experiment.seed)))
(noise,), (sample,) = (
    its_run.generate("def ", max_new_tokens=300, temperature=0.8, seed=0) for its_run in (untrained, run)
)
print("--- before training", ascii(f"def {noise[:60]}"), "--- after training", f"def {sample}", sep="\n")

# %% [markdown]
# Before training it is noise: most of it is not even text. After 400 steps it has the look of code: words,
# lines, indentation, brackets. It does not know what code means, and few of the words exist; that takes more
# layers, more data and more steps. (At a *temperature* of 0.8 the likely bytes are drawn more often than
# predicted.)
#
# ## Where the loss is
#
# There is no magic between the notebooks before and this one: the trained parameters, in the plain functions
# of [notebook 4](4_hyena.ipynb), give the same logits as the Flax model. Here they give the loss of each byte
# of a small text. Position $t$ predicts byte $t + 1$.

# %%
line = "for name in names:\n    print(name)\n"
tokens = np.array([list(line.encode())])
config = run.experiment.model
mixer_config, length = config.pattern[0], config.max_len

oracle = mixer_oracle(mixer_config)
logits = language_model(run.params, tokens, config, [lambda params, x: oracle(params, x, length)])
log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
loss = -log_p[0, np.arange(len(line) - 1), tokens[0, 1:]]

letters = [{"\n": "↵", " ": "␣"}.get(character, character) for character in line]
of_byte = np.append(0, loss)  # at the byte itself; the first is not predicted
show.bars(of_byte, letters, xlabel="byte", ylabel="loss (nats)")

# %% [markdown]
# It is high where something new begins, a name or a bracket, for many things could come there. Within `name`
# it falls: after `nam` there is little choice. Once indentation has begun, each further space is almost free.
# But the model does not know when to stop: the first byte after the four spaces costs most of all, for it
# expected a fifth space.
#
# ## The filters, before and after
#
# Each layer has one implicit filter for each of 64 channels ([notebook 3](3_filters.ipynb)). The picture
# shows three of them, spread over the channels: channel 0 has the slowest window, channel 63 the fastest.


# %%
def filters_of(params, block):
    """The filters [D, L] of a layer."""
    own = params[f"blocks_{block}"]["mixer"]["filter"]
    return filters.implicit(own, 1, length, length, mixer_config.filter)[0]


changes = []
axes = show.panels(2, 2, height=4, sharex=True, sharey="row")
for block, row in enumerate(axes):
    before, after = (filters_of(its_run.params, block) for its_run in (untrained, run))
    changes.append(np.linalg.norm(after - before) / np.linalg.norm(before))
    for ax, when, h in zip(row, ("before", "after"), (before, after), strict=True):
        curves = {f"channel {channel}": h[channel] for channel in (0, 20, 63)}
        show.lines(curves, ax=ax, xlabel="lag s", title=f"layer {block + 1}, {when} training")
print("the filters changed by", " and ".join(f"{change:.0%}" for change in changes), "of their size")

# %% [markdown]
# ## The matrix that it applies to this text
#
# As in notebook 4, each channel of a layer is a matrix $M = D_0 (S_h + b I) D_1$ of this text: gate, filter,
# gate. `trace` gives the input of each layer and `mixing` the matrices of its mixer. The picture shows the
# size of their entries, as the root mean square over the channels: what each byte (row) takes from which
# earlier byte (column), relative to the largest of the row. The diagonal, each byte's own path, would
# outshine the rest and is left out.

# %%
layers = trace(run.model, run.params, tokens).layers
found = [mixing(layer.mixer, layer.own(run.params), layer.inputs).matrices[0] for layer in layers]
sizes = [np.sqrt(np.square(matrices).mean(axis=0)) for matrices in found]

past = [np.tril(size, -1) for size in sizes]
shares = [size / np.maximum(size.max(axis=1, keepdims=True), 1e-12) for size in past]
panels = {f"layer {number}": share for number, share in enumerate(shares, 1)}
show.matrices(panels, 1, cmap="Greys", height=4.4, names=letters, xlabel="takes from", ylabel="byte")

ones = np.ones_like(past[0])
four = np.tril(ones, -1) - np.tril(ones, -5)
near = [np.mean((size * four).sum(axis=1)[12:] / size.sum(axis=1)[12:]) for size in past]
print("the four bytes before have {:.0%} of a row in layer 1, {:.0%} in layer 2".format(*near))

# %% [markdown]
# The largest entries are close to the diagonal; the printed shares say how much the nearest four bytes have
# of a row. Where a column is darker than its neighbours, many later bytes read that one; where a row is dark
# far to the left, that byte looks back far.
#
# ## Recall: Hyena against attention
#
# Language models are often judged by what they can look up in their own context. Two small tasks ask for
# that and nothing else. In **associative recall** (Poli et al. 2023) a row shows 32 pairs of a key and its
# value, with five keys that come up again and again, and then asks for the value of one key; training
# predicts every token. In **multi-query associative recall**, MQAR ([Arora et al.
# 2023](https://arxiv.org/abs/2312.04927)), a row shows four pairs, with keys that are new in every row, and
# then asks for all four. Every guess among the values shown is right one time in four there.

# %%
for name in ("recall", "mqar"):
    data = hyena_jax.load_config(f"tasks:{name}").data
    example = load_task(data).held_out_rows(np.arange(1))
    print(f"{name}, inputs:", *example["inputs"][0])
    print(" " * len(name), "answers:", *example["targets"][0])


# %%
def recall(task, mixer, steps=800):
    """The accuracy by step of two layers of a mixer on a task."""
    given = hyena_jax.load_config(f"tasks:{task}")
    # Attention alone has no notion of order, and gets learned positions.
    positions = isinstance(mixer, AttentionConfig)
    model = dataclasses.replace(given.model, pattern=(mixer,), learned_positions=positions)
    schedule = dataclasses.replace(given.optimizer.schedule, warmup_steps=steps // 10)
    optimizer = dataclasses.replace(given.optimizer, schedule=schedule)
    training = dataclasses.replace(given.training, steps=steps, eval_every=100, checkpoint_every=steps)
    experiment = dataclasses.replace(given, model=model, optimizer=optimizer, training=training)
    return train(experiment, "accuracy")[1]


hyena_config, attention_config = HyenaConfig(), AttentionConfig(n_heads=1)
of_recall = {"Hyena": recall("recall", hyena_config), "attention": recall("recall", attention_config)}
of_mqar = {"Hyena": recall("mqar", hyena_config), "attention": recall("mqar", attention_config)}
of_mqar["gated delta rule"] = recall("mqar", GatedDeltaConfig(n_heads=2), 400)

left, right = show.panels(2, height=2.8)
for ax, title, curves in ((left, "associative recall", of_recall), (right, "MQAR", of_mqar)):
    curves = {name: (list(found), list(found.values())) for name, found in curves.items()}
    styles = ("o-", "s-", "^-")
    show.lines(curves, ax=ax, styles=styles, title=title, xlabel="step", ylabel="accuracy", ylim=(0, 1.05))

# %% [markdown]
# Within 800 steps each of the two solves one task and not the other. At associative recall Hyena is right
# nearly always after 500 steps, while attention stays at 0.4, twice what chance gives. At MQAR attention
# finds the solution suddenly, after 300 steps; Hyena stays at one in four: it knows which values were shown,
# and not to which keys they belong. Its filters answer a token after fixed lags, whatever the token is, and
# the gates of two narrow layers do not make up for that here. The gated delta rule ([notebook
# 7](7_matrix_memories.ipynb)) writes a value at its key, and needs the fewest steps of all.
#
# These are single runs at one width and one learning rate, and no verdict. With several seeds and searched
# rates, [one study](../recall_by_mixer/README.md) asks which mixers recall one pair among 20 or 30 symbols,
# and [another](../recall/README.md) how many pairs one block keeps.
#
# ## Where to go from here
#
# - `hyena-jax show RUN --text TEXT` writes a page of such pictures, and more, about any run.
# - `hyena-jax train quickstart --workdir runs/quickstart` trains the larger one, and `hyena-jax train
#   tasks:mqar --workdir runs/mqar` a task.
# - Give the model `pattern=(HawkConfig(),)`, and the first half of this notebook trains Hawk.
# - The [mixers' page](../../hyena_jax/mixers/README.md) lists everything that can stand in that place.
#
# ## Checks

# %%
# The model learns, and uses more than the last byte.
assert losses[400] < losses[200] < losses[50] < np.log(256)
assert losses[400] < by_last_byte < by_frequency
# NumPy and Flax agree.
assert np.allclose(logits, run.model.apply({"params": run.params}, tokens), atol=1e-3)
# Further spaces are almost free, the first byte after them is not, and a name gets easier.
indent, name, after = line.index("    "), line.index("name"), line.index("print")
assert of_byte[indent + 1 : after].max() < 0.1 * loss.mean()
assert of_byte.argmax() == after
assert logits[0, after - 1].argmax() == ord(" ")  # it expected a fifth
assert of_byte[name + 3] < of_byte[name + 1] < of_byte[name]
# The windows are slowest in channel 0, and the filters have changed.
assert (np.diff(abs(filters.decay_rates(mixer_config.filter, config.d_model))) > 0).all()
assert min(changes) > 0.1
# The matrices are those of notebook 4, here of the first channel of the first layer; all are causal.
params, n_bytes = run.params["blocks_0"]["mixer"], len(line)
x_0, x_1, _ = (part[0, 0] for part in projections(params, layers[0].inputs, 3))
h, b = filters_of(run.params, 0)[0, :n_bytes], params["skip"][0, 0]
ours = np.diag(x_0) @ (toeplitz(h) + b * np.eye(n_bytes)) @ np.diag(x_1)
assert np.allclose(found[0][0], ours, atol=1e-3 * abs(ours).max())
assert all((np.triu(size, 1) == 0).all() for size in sizes)
# Each solves one task; which, is far from chance.
assert of_recall["Hyena"][800] > 0.9 > of_recall["attention"][800] + 0.2
assert of_mqar["attention"][800] > 0.9 > of_mqar["Hyena"][800] + 0.2
assert of_mqar["gated delta rule"][400] > 0.9
