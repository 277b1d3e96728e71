# %% [markdown]
# # 5. Hawk, step by step and as a scan
#
# A convolution looks at all earlier inputs. A **recurrence** keeps a summary of them, the *state*, and
# updates it at every step. Hawk (De et al. 2024) is built on a recurrence whose memory is controlled by the
# input. This notebook starts with one number, adds the gates one by one, shows how a recurrence runs in
# parallel, and ends with the whole block.
#
# Time is $t = 0, 1, \dots, L-1$. Channels do not talk to each other inside the recurrence, so one channel is
# enough for the pictures. The letters are those of the paper: here $x$ is the input and $h$ the state, not a
# gate and a filter as in the notebooks before, and $i$ is a gate.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import show
from loops import doubling_scan, linear_convolution

from hyena_jax.config import HawkConfig
from hyena_jax.mixers import Hawk, mixer_oracle
from hyena_jax.ops.linear_recurrence import associative_recurrence
from hyena_jax.ops.rg_lru import factors
from hyena_jax.reference.recurrence import linear_recurrence, rg_lru

rng = np.random.default_rng(0)

# %% [markdown]
# ## One number that fades
#
# $$h_t = a \, h_{t-1} + x_t, \qquad h_{-1} = 0 .$$
#
# Oracle: [`linear_recurrence`](../../hyena_jax/reference/recurrence.py). Code:
# [`linear_recurrence`](../../hyena_jax/ops/linear_recurrence.py). Deep models built on it: [Orvieto et
# al. 2023](https://arxiv.org/abs/2303.06349).
#
# The state $h$ fades by the factor $a$ at each step and takes the new input. An input from $s$ steps ago
# still counts $a^s$: the state is a convolution with the filter $1, a, a^2, \dots$ After $-1/\log a$ steps a
# memory has faded to $1/e \approx 37\%$. That is its **memory length**.

# %%
show.code(linear_recurrence)


# %%
def state_of(a, x):
    """The states [L] of one channel; a and x [L]."""
    return linear_recurrence(a[None, :, None], x[None, :, None], np.zeros((1, 1)))[0][0, :, 0]


two_inputs = np.zeros(100)
two_inputs[[5, 40]] = 1.0, 0.6
paces = {a: state_of(np.full(100, a), two_inputs) for a in (0.8, 0.95, 0.99)}

curves = {f"a = {a}: memory of {-1 / np.log(a):.0f} steps": h for a, h in paces.items()}
show.lines(curves, xlabel="time t", ylabel="state $h_t$", title="two inputs, at 5 and at 40", ylim=(-0.05, 2))

# %% [markdown]
# ## The scale of the input
#
# A long memory adds up many inputs, so the state grows: with white noise of variance 1 as input, the variance
# of the state is $1/(1-a^2)$, 50 for $a = 0.99$. Hawk scales the input so that the state keeps the input's
# size if the inputs are independent from step to step: $h_t = a\, h_{t-1} + \sqrt{1 - a^2}\; x_t$.
#
# Inputs that resemble each other still add up: for a constant input of 1 the scaled state tends to
# $\sqrt{(1+a)/(1-a)}$, 14 for $a = 0.99$.

# %%
noise, slow = rng.normal(size=20_000), np.full(20_000, 0.99)
plain, scaled = state_of(slow, noise), state_of(slow, np.sqrt(1 - slow**2) * noise)
constant = state_of(slow, np.sqrt(1 - slow**2))[-1]
print(f"variance: input {noise.var():.1f}, plain state {plain.var():.0f}, scaled state {scaled.var():.1f}")

# %% [markdown]
# ## The gates of the RG-LRU
#
# So far $a$ is a constant, and the recurrence forgets everything at one pace. The *real-gated linear
# recurrent unit* lets the input decide, by two gates between 0 and 1 ($\sigma$ is the logistic function,
# $W_a$ and $W_x$ are weights):
#
# $$r_t = \sigma(W_a x_t), \qquad i_t = \sigma(W_x x_t),$$
# $$a_t = a^{\,8 r_t}, \qquad h_t = a_t \, h_{t-1} + \sqrt{1 - a_t^2}\;\, i_t \, x_t .$$
#
# [De et al. 2024, section 2.4, equations 1 to 4](https://arxiv.org/abs/2402.19427). Oracle:
# [`rg_lru`](../../hyena_jax/reference/recurrence.py). Code:
# [`factors`](../../hyena_jax/ops/rg_lru.py) and [`Hawk`](../../hyena_jax/mixers/hawk.py).
#
# - The **recurrence gate** $r_t$ sets the pace. With $r_t = 0$ we get $a_t = 1$: the state is kept as it is,
#   and no input enters. With $r_t = 1$ the state fades by $a^8$.
# - The **input gate** $i_t$ decides how much of the input enters.
#
# `factors` computes $a_t$ and $1 - a_t^2$ from the logarithm of $a$, so that neither loses digits when $a_t$
# is close to 1. (Its last two arguments are not of the paper: they give factors of either sign.)

# %%
show.code(factors)

# %% [markdown]
# Together the gates make a memory that can be written and held. Below we set them by hand: the recurrence
# forgets quickly, until a marked input at time 20 arrives; then the gates close and hold it.

# %%
length = 80
inputs = 0.4 * rng.normal(size=length)
inputs[20] = 1.5  # the one to remember
r, i = np.ones(length), 0.3 * np.ones(length)
i[20] = 1.0
r[21:60] = 0.0  # hold; at 60 open again

rate = np.array([np.log(np.expm1(0.5))])  # a = exp(-softplus(rate)) = exp(-0.5)
one_document = np.zeros((1, length), bool)  # the state is cleared where a document starts: nowhere
held = rg_lru(*(z[None, :, None] for z in (inputs, r, i)), rate, one_document)[0, :, 0]

top, bottom = show.panels(1, 2, height=3.6, sharex=True, height_ratios=[2, 1])
show.lines({"input $x_t$": inputs, "state $h_t$": held}, styles=("pale",), ax=top, ylabel="value")
curves = {"recurrence gate $r_t$": r, "input gate $i_t$": i}
show.lines(curves, styles=("steps", "steps"), ax=bottom, xlabel="time t", ylabel="gate", ylim=(-0.1, 2.6))

# %% [markdown]
# A convolution cannot do this: its filter forgets every input at the same pace, whatever the input is.
#
# ## A recurrence in parallel
#
# Step $t$ needs the result of step $t-1$. It looks as if $L$ steps must take $L$ turns. But two steps in a
# row are one step of the same kind. First $h \to a' h + x'$, then $h \to a h + x$, gives
#
# $$h \;\to\; (a a')\, h + (a x' + x) .$$
#
# Hillis and Steele 1986, Blelloch 1990; for neural networks [Martin and Cundy
# 2018](https://arxiv.org/abs/1709.04057). Oracle:
# [`doubling_scan`](loops.py). Code:
# [`associative_recurrence`](../../hyena_jax/ops/linear_recurrence.py).
#
# So compose each step with the one before it, all at the same time: now every entry covers two steps. Compose
# each with the entry two before it: four steps. After $\log_2 L$ **rounds** every entry covers everything
# from the start. This is a *parallel scan*. The first function below returns the values after every round,
# the second leaves the rounds to JAX; its `compose` is the equation above.

# %%
show.code(doubling_scan, associative_recurrence)

# %% [markdown]
# The picture feeds the scan one impulse for each time $s$, as columns of a matrix, with $a_t = 0.85$. Row $t$
# then shows how much of which input has arrived in $h_t$.

# %%
rounds = doubling_scan(np.full((32, 32), 0.85), np.eye(32))
panels = {f"after round {n}" if n else "at first": reached for n, reached in enumerate(rounds)}
show.matrices(panels, 1, cmap="Blues", height=1.9, xlabel="input time s", ylabel="output time t")

# %% [markdown]
# Five rounds for 32 steps, seventeen for 100,000. The result is that of the loop, also with factors that
# change. On a CPU with few cores the plain loop is faster all the same, and the package takes it there; scans
# are for devices that compute thousands of entries at a time.

# %%
a, inputs = rng.uniform(0.2, 1, (100, 3)), rng.normal(size=(100, 3))
loop, _ = linear_recurrence(a[None], inputs[None], np.zeros((1, 3)))
scan = doubling_scan(a, inputs)[-1]
in_jax, _ = associative_recurrence(jnp.float32(a[None]), jnp.float32(inputs[None]), jnp.zeros((1, 3)))

# %% [markdown]
# ## The whole block
#
# Hawk puts the recurrence into one of two branches:
#
# $$y = W_o \big( \mathrm{GELU}(W_g x) \odot \mathrm{RGLRU}(\mathrm{FIR}_4(W_r x)) \big).$$
#
# [De et al. 2024, section 2.3, figure 2c](https://arxiv.org/abs/2402.19427). Oracle:
# [`hawk`](../../hyena_jax/reference/recurrence.py). Code: [`Hawk`](../../hyena_jax/mixers/hawk.py).
#
# $W_g$, $W_r$, $W_o$ are dense layers, $\mathrm{FIR}_4$ a short convolution of four taps, and the left branch
# gates what the recurrence remembers. In the code, `_gates` gives $i_t$, $a_t$ and $\sqrt{1 - a_t^2}$, and
# `seq.recur` is the recurrence. `seq` has everything that happens along the sequence; [notebook
# 9](9_own_mixer.ipynb) is about it.

# %%
show.code(Hawk._gates, Hawk.mix)

# %%
config = HawkConfig()
module = Hawk(d_model=16, max_len=64, config=config)
x = rng.normal(size=(2, 64, 16)).astype(np.float32)
parallel, variables = module.init_with_output(jax.random.key(0), x)
in_numpy = mixer_oracle(config)(variables["params"], x, 64)

# %% [markdown]
# For training the block sees the whole sequence. For decoding it takes one token at a time and carries its
# state: the last three inputs of the FIR, and $h$. Both give the same values, and the state never grows,
# which is why such models decode long texts cheaply.

# %%
state = module.bind(variables).init_state(2, 64)
step = jax.jit(lambda state, token: module.apply(variables, state, token, method="step"))
outputs = []
for t in range(64):
    state, y = step(state, x[:, t])
    outputs.append(y)

kept = [leaf[0].size for leaf in jax.tree.leaves(state) if leaf.ndim > 1]  # of one sequence
print(f"a state of {sum(kept)} numbers; attention would keep {64 * 2 * 16:,} after 64 tokens")

# %% [markdown]
# How long does a freshly initialised block remember? The factors start with $a$ between 0.9 and 0.999, so
# $a^{8 r_t}$ covers short and long memories from the beginning; training moves them.

# %%
initial = np.exp(-np.log1p(np.exp(np.float64(variables["params"]["rate"]))))
memory = -1 / np.log(initial**4)  # with the gate half open, 8 r = 4

labels = {"xlabel": "channel, sorted", "ylabel": "memory (steps)"}
show.bars(np.sort(memory), title="with the recurrence gate half open", **labels)

# %% [markdown]
# ## What to take along
#
# - $h_t = a_t h_{t-1} + \dots$: the factor $a_t$ is the memory, and Hawk computes it from the input.
# - $\sqrt{1 - a_t^2}$ keeps the state at the size of the input, however long it remembers, for inputs that
#   are independent from step to step.
# - Step by step for decoding, in $\log_2 L$ rounds as a scan: the same values.
#
# Next: [two relatives of attention](6_linear_attention.ipynb).
#
# ## Checks

# %%
# A recurrence with one factor is a convolution.
for pace, h in paces.items():
    assert np.allclose(h, linear_convolution(two_inputs, pace ** np.arange(100))[:100])
# The scale keeps the variance of independent inputs, and not a constant.
assert 35 < plain.var() < 65
assert 0.7 < scaled.var() < 1.3
assert np.isclose(constant, np.sqrt((1 + 0.99) / (1 - 0.99)))
assert round(constant) == 14
# The gates write, hold without loss, and forget again.
assert abs(held[20] - 1.5) < 0.1
assert (held[20:60] == held[20]).all()
assert abs(held[61:]).max() < 0.5
# The package's factors are those of the equation.
a_t, rest = factors(jnp.float32(r[:, None]), jnp.float32(rate))
assert np.allclose(a_t, np.exp(-0.5 * 8 * r)[:, None], atol=1e-6)
assert np.allclose(rest, 1 - a_t**2, atol=1e-6)
# Round n covers 2^n steps, and all rounds are the loop.
for n, reached in enumerate(rounds):
    assert (np.count_nonzero(reached, axis=1) == np.minimum(np.arange(32) + 1, 2**n)).all()
assert len(rounds) == 1 + np.log2(32)
assert np.allclose(scan, loop[0])
assert np.allclose(in_jax, loop, atol=1e-4)
# The block is its oracle, and decodes what it computes in parallel, from a state of 3 + 1 numbers a channel.
assert np.allclose(in_numpy, parallel, atol=1e-5)
assert np.allclose(np.stack(outputs, axis=1), parallel, atol=1e-5)
assert sum(kept) == 3 * 16 + 16
assert 0.9 <= initial.min() < initial.max() <= 0.999
