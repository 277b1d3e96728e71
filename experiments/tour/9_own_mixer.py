# %% [markdown]
# # 9. A mixer of your own
#
# Every mixer of the package is a function of its input $x$ and of `seq`. Along the sequence it only calls
# `seq`; everything else it does token by token. In return it trains on whole sequences, decodes from a state,
# keeps packed documents apart or refuses them, and runs with its length sharded over devices, without a line
# for any of that.
# This notebook writes three mixers that way, and one that breaks the rule.

# %%
import dataclasses
import tempfile
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import show

import hyena_jax
from hyena_jax.config import MixerConfig, register
from hyena_jax.inspect import mixing
from hyena_jax.mixers import Mixer, Sequence, decodes_by_state, mixer_oracle
from hyena_jax.mixers.consistency import check_consistency
from hyena_jax.reference.convolution import short_conv
from hyena_jax.reference.recurrence import linear_recurrence

rng = np.random.default_rng(0)

# %% [markdown]
# ## What there is to write
#
# A subclass of `Mixer` writes `mix(x, seq, deterministic)`, from $[B, T, D]$ to $[B, T, D]$. The base class
# has the four methods that training and generation call. They differ in the `seq` that they pass:

# %%
show.code(Mixer.__call__, Mixer.prefill, Mixer.step)

# %% [markdown]
# `Parallel` is for whole sequences, `Online` for the tokens after a state, and both have the same operators:
#
# | call | does |
# |---|---|
# | `seq.fir(x, taps, bias)` | a short convolution |
# | `seq.shift(x)` | the token before |
# | `seq.recur(a, x)` | $h_t = a_t h_{t-1} + x_t$ |
# | `seq.update(q, k, v, log_a, read)` | a matrix memory ([notebook 7](7_matrix_memories.ipynb)) |
# | `seq.attend(q, k, v)` | softmax attention |
# | `seq.filters(...)`, `seq.conv(...)` | long convolutions |
# | `seq.scan(f, init, xs)` | any function of a carry and a token |
# | `seq.carry(name, empty, run, whole)` | any operator of your own |
#
# ## A moving average
#
# Take a short filter, and behind it an average that fades, with a trained $a$ for each channel:
#
# $$y_t = a \, y_{t-1} + (1 - a) \, u_t, \qquad u = \mathrm{FIR}_4(x) .$$
#
# Such averages in front of attention: [Ma et al. 2022](https://arxiv.org/abs/2209.10655). Oracles:
# [`linear_recurrence`](../../hyena_jax/reference/recurrence.py),
# [`short_conv`](../../hyena_jax/reference/convolution.py). Code:
# [`linear_recurrence`](../../hyena_jax/ops/linear_recurrence.py),
# [`short_conv`](../../hyena_jax/ops/short_conv.py).
#
# Its options are a frozen dataclass; `register` gives it a name and, if there is one, its oracle.


# %%
@dataclass(frozen=True)
class EMAConfig(MixerConfig):
    decay: float = 0.9
    """Initial decay a of every channel."""


class EMA(Mixer):
    config: EMAConfig = EMAConfig()

    @nn.compact
    def mix(self, x, seq, deterministic):  # [B, T, D] -> [B, T, D]
        taps = self.param("taps", nn.initializers.normal(0.5), (self.d_model, 4))
        a = self.param("decay", nn.initializers.constant(self.config.decay), (self.d_model,))
        u = seq.fir(x.astype(a.dtype), taps)
        return seq.recur(a, (1 - a) * u).astype(x.dtype)


def ema_oracle(config, params, x, max_len, segment_ids):
    """The same in NumPy, for one document."""
    u = short_conv(x.transpose(0, 2, 1), params["taps"], np.zeros(x.shape[2])).transpose(0, 2, 1)
    a = np.broadcast_to(params["decay"], u.shape)
    return linear_recurrence(a, (1 - a) * u, np.zeros_like(u[:, 0]))[0]


register("ema_of_the_tour", EMAConfig, EMA, ema_oracle)

# %% [markdown]
# That is all. Does it keep its promises? `forms` computes the same 24 tokens in four ways: as a whole; a
# prompt of 10 and then token by token; behind six tokens of padding; and in a batch that packs them behind
# another document.

# %%
LENGTH, WIDTH = 24, 6
x = rng.normal(size=(2, LENGTH, WIDTH)).astype(np.float32)


def forms(module):
    """The module's parameters, and its outputs [2, L, D] in four ways."""
    whole, variables = module.init_with_output(jax.random.key(0), x)
    bound, outputs = module.bind(variables), {"whole": whole}

    state, y = bound.prefill(bound.init_state(2, LENGTH), x[:, :10])
    answers = [y]
    for t in range(10, LENGTH):
        state, y = bound.step(state, x[:, t])
        answers.append(y[:, None])
    outputs["token by token"] = np.concatenate(answers, axis=1)

    padded = np.pad(x, [(0, 0), (6, 0), (0, 0)], constant_values=9.0)
    state = bound.init_state(2, LENGTH + 6)
    outputs["padded"] = bound.prefill(state, padded, np.full(2, LENGTH))[1][:, 6:]

    packed = np.concatenate([x[::-1, :6], x], axis=1)
    ids = np.repeat([[0, 1]], [6, LENGTH], axis=1).repeat(2, axis=0)
    try:
        outputs["packed"] = bound(packed, ids)[:, 6:]
    except hyena_jax.UserError as error:
        print("packed:", error)
    return variables.get("params", {}), outputs


def differences(outputs):
    """The largest difference of each form from the whole."""
    return {name: abs(y - outputs["whole"]).max() for name, y in outputs.items() if name != "whole"}


def report(outputs):
    """Prints the differences."""
    for name, difference in differences(outputs).items():
        print(f"{name}: differs from the whole by at most {difference:.1g}")


ema = EMA(WIDTH, LENGTH + 6, EMAConfig())
ema_params, of_ema = forms(ema)
report(of_ema)

# %% [markdown]
# The four agree, packing included: `recur` starts anew where a document starts, and `fir` sees nothing before
# it. What does an operator do for that? Here is the shortest, `shift`. Each operator is one call of `carry`
# with an empty memory, a function `run` from a memory to the outputs and the memory after them, and, where it
# pays, another form `whole` for whole sequences.

# %%
show.code(Sequence.shift)

# %% [markdown]
# ## A cell of your own, by `scan`
#
# What is not linear in its state takes `scan`, with a function of one token. This is a gated cell that looks
# at the token before:


# %%
@dataclass(frozen=True)
class CellConfig(MixerConfig):
    pass


class Cell(Mixer):
    config: CellConfig = CellConfig()

    @nn.compact
    def mix(self, x, seq, deterministic):
        w = self.param("w", nn.initializers.normal(0.5), (self.d_model, self.d_model))
        both = jnp.concatenate([x, seq.shift(x)], axis=-1).astype(w.dtype)
        gates, inputs = jnp.split(nn.Dense(2 * self.d_model)(both), 2, axis=-1)

        def f(h, now):
            gate, new = now
            gate = jax.nn.sigmoid(gate + h @ w)
            h = gate * h + (1 - gate) * jnp.tanh(new)
            return h, h

        return seq.scan(f, jnp.zeros((len(x), self.d_model), w.dtype), (gates, inputs)).astype(x.dtype)


_, of_cell = forms(Cell(WIDTH, LENGTH + 6, CellConfig()))
report(of_cell)

# %% [markdown]
# ## An operator of your own, by `carry`
#
# The largest input so far, channel by channel. `run` gets the memory, at first `empty()`, and returns the
# outputs and the new memory. It has to think of two things itself: padding must not count (`masked`), and it
# does not keep packed documents apart, so it says so.


# %%
@dataclass(frozen=True)
class PeakConfig(MixerConfig):
    pass


class Peak(Mixer):
    config: PeakConfig = PeakConfig()

    def mix(self, x, seq, deterministic):
        seq.refuse_documents()

        def run(peak):  # [B, 1, D]
            seen = jnp.concatenate([peak, seq.masked(x, fill=-jnp.inf)], axis=1)
            y = jax.lax.cummax(seen, axis=1)
            return y[:, 1:], y[:, -1:]

        return seq.carry("peak", lambda: jnp.full_like(x[:, :1], -jnp.inf), run)


_, of_peak = forms(Peak(WIDTH, LENGTH + 6, PeakConfig()))
report(of_peak)

# %% [markdown]
# ## What breaks the rule
#
# A `mix` that moves values along the sequence without `seq` could still train, for a whole sequence needs no
# memory. But from a state it sees only the new tokens. Here is a running sum by `jnp.cumsum`, and what it
# answers:


# %%
class Wrong(Peak):
    def mix(self, x, seq, deterministic):
        return jnp.cumsum(x, axis=1)  # right: seq.recur(1.0, x)


_, of_wrong = forms(Wrong(WIDTH, LENGTH + 6, PeakConfig()))
whole, token_by_token = (of_wrong[name][0, :, 0] for name in ("whole", "token by token"))
curves = {"as a whole": whole, "a prompt of 10, then token by token": token_by_token}
show.lines(curves, styles=("thick", ".-"), xlabel="time t", ylabel="$y_t$", title="without seq")

# %% [markdown]
# So the package compares the forms of a mixer of yours, on a few tokens, before it trains it:

# %%
for module in (Cell(WIDTH, LENGTH, CellConfig()), Wrong(WIDTH, LENGTH, PeakConfig())):
    try:
        check_consistency(module)
        print(type(module).__name__, "agrees with itself")
    except hyena_jax.UserError as error:
        print(error)

# %% [markdown]
# ## Its matrices
#
# A mixer that marks what it mixes, `seq.values(v, axes)` and `seq.mixed(o, axes)`, can be looked into. The
# marks change nothing. Letters name the axes: B, T, and any other for the matrices, here one for each
# channel D. The decays are set by hand, and the short filter to a mean of four tokens.


# %%
class MarkedEMA(EMA):
    @nn.compact
    def mix(self, x, seq, deterministic):
        taps = self.param("taps", nn.initializers.normal(0.5), (self.d_model, 4))
        a = self.param("decay", nn.initializers.constant(self.config.decay), (self.d_model,))
        u = seq.fir(seq.values(x.astype(a.dtype), "BTD"), taps)
        return seq.mixed(seq.recur(a, (1 - a) * u), "BTD").astype(x.dtype)


decays = np.float32([0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
marked_params = {"taps": np.full((WIDTH, 4), 0.25, np.float32), "decay": decays}
found = mixing(MarkedEMA(WIDTH, LENGTH, EMAConfig()), marked_params, x)
panels = {f"a = {a:.2f}": matrix for a, matrix in zip(decays, found.matrices[0], strict=True)}
show.matrices(panels, height=2, xlabel="input time s", ylabel="output time t")

# %% [markdown]
# ## It trains
#
# A config takes the new mixer as any other, and so do the commands, if `--plugin FILE` names the file that
# registers it. Here two layers of moving averages learn bytes of Python's standard library for 200 steps;
# [notebook 10](10_training.ipynb) does the same with Hyena, which is better at it.

# %%
quickstart = hyena_jax.load_config("quickstart")
sizes = {"n_layers": 2, "d_model": 64, "d_ff": 256}
experiment = dataclasses.replace(
    quickstart,
    model=dataclasses.replace(quickstart.model, pattern=(EMAConfig(),), **sizes),
    optimizer=dataclasses.replace(quickstart.optimizer, groups=()),  # those are of Hyena's parameters
    training=dataclasses.replace(quickstart.training, steps=200, eval_every=50, eval_windows=100),
)
with tempfile.TemporaryDirectory() as folder:
    trained = hyena_jax.train(experiment, folder, quiet=True)
    losses = {row["step"]: row["validation/loss"] for row in trained.metrics() if "validation/loss" in row}
for step, loss in losses.items():
    print(f"{loss:.2f} nats per byte after {step} steps")

# %% [markdown]
# ## What to take along
#
# - Write `mix(x, seq, deterministic)`; along the sequence call `seq` and nothing else.
# - Recurrences, filters, attention and memories are there; `scan` takes any cell, `carry` any operator.
# - The forms are compared before a training, and by [the test that every mixer
#   passes](../../tests/extensions/README.md), yours too.
#
# Last: [train a model and look into it](10_training.ipynb).
#
# ## Checks

# %%
# All forms of the three mixers agree, and those of the fourth do not.
for outputs in (of_ema, of_cell, of_peak):
    assert max(differences(outputs).values()) < 1e-5
assert list(of_ema) == list(of_cell) == ["whole", "token by token", "padded", "packed"]
assert abs(whole - token_by_token)[:10].max() == 0
assert abs(whole - token_by_token)[10:].max() > 1
# The average is its oracle, the peak NumPy's.
assert np.allclose(mixer_oracle(EMAConfig())(ema_params, x, LENGTH), of_ema["whole"], atol=1e-6)
assert (of_peak["whole"] == np.maximum.accumulate(x, axis=1)).all()
# Its matrices are what it does, and are causal.
assert np.allclose(found.outputs()[..., 0], ema.apply({"params": marked_params}, x), atol=1e-6)
assert (np.triu(found.matrices[0, 0], 1) == 0).all()
# It learns, and decodes from a state.
assert losses[200] < losses[100] < losses[50] < np.log(256)
assert decodes_by_state(EMAConfig())
assert len(trained.generate("def ", max_new_tokens=20, seed=0)[0]) > 0
