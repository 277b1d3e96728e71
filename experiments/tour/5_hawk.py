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
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.config import HawkConfig
from hyena_jax.mixers import Hawk
from hyena_jax.ops.linear_recurrence import associative_recurrence
from hyena_jax.reference.convolution import linear_convolution
from hyena_jax.reference.recurrence import doubling_scan, hawk, linear_recurrence, rg_lru

plt.style.use("tour.mplstyle")
rng = np.random.default_rng(0)

# %% [markdown]
# ## One number that fades
#
# $$h_t = a \, h_{t-1} + x_t, \qquad h_{-1} = 0 .$$
#
# The state $h$ fades by the factor $a$ at each step and takes the new input. An input from $s$ steps ago
# still counts $a^s$: the state is a convolution with the filter $1, a, a^2, \dots$ After $-1/\log a$ steps a
# memory has faded to $1/e \approx 37\%$. That is its **memory length**.

# %%
x = np.zeros((1, 100, 1))
x[0, [5, 40], 0] = 1.0, 0.6
fig, ax = plt.subplots()
for a in (0.8, 0.95, 0.99):
    h, _ = linear_recurrence(np.full_like(x, a), x, np.zeros((1, 1)))
    ax.plot(h[0, :, 0], label=f"a = {a}: memory of {-1 / np.log(a):.0f} steps")
    assert np.allclose(h[0, :, 0], linear_convolution(x[0, :, 0], a ** np.arange(100))[:100])
ax.set(xlabel="time t", ylabel="state $h_t$", title="two inputs, at 5 and at 40", ylim=(-0.05, 1.9))
ax.legend(loc="upper right")

# %% [markdown]
# ## The scale of the input
#
# A long memory adds up many inputs, so the state grows: with white noise of variance 1 as input, the variance
# of the state is $1/(1-a^2)$, 50 for $a = 0.99$. Hawk scales the input so that the state keeps the input's
# size if the inputs are independent from step to step:
#
# $$h_t = a\, h_{t-1} + \sqrt{1 - a^2}\; x_t .$$
#
# Inputs that resemble each other still add up: for a constant input of 1 the scaled state tends to
# $\sqrt{(1+a)/(1-a)}$, 14 for $a = 0.99$.

# %%
noise = rng.normal(size=(1, 20_000, 1))
a = np.full_like(noise, 0.99)
plain, _ = linear_recurrence(a, noise, np.zeros((1, 1)))
scaled, _ = linear_recurrence(a, np.sqrt(1 - a**2) * noise, np.zeros((1, 1)))
print(f"variance: input {noise.var():.1f}, plain state {plain.var():.0f}, scaled state {scaled.var():.1f}")

assert 35 < plain.var() < 65
assert 0.7 < scaled.var() < 1.3

constant, _ = linear_recurrence(a, np.sqrt(1 - a**2), np.zeros((1, 1)))
assert np.isclose(constant[0, -1, 0], np.sqrt((1 + 0.99) / (1 - 0.99)))
assert round(constant[0, -1, 0]) == 14

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
# - The **recurrence gate** $r_t$ sets the pace. With $r_t = 0$ we get $a_t = 1$: the state is kept as it is,
#   and no input enters. With $r_t = 1$ the state fades by $a^8$.
# - The **input gate** $i_t$ decides how much of the input enters.
#
# Together they make a memory that can be written and held. Below we set the gates by hand: the recurrence
# forgets quickly, until a marked input at time 20 arrives; then the gates close and hold it.

# %%
length = 80
inputs = 0.4 * rng.normal(size=length)
inputs[20] = 1.5  # the one to remember
r, i = np.ones(length), 0.3 * np.ones(length)
i[20] = 1.0
r[21:60] = 0.0  # hold; at 60 open again

rate = np.array([np.log(np.expm1(0.5))])  # a = exp(-softplus(rate)) = exp(-0.5)
column = (1, length, 1)
starts = np.zeros((1, length), bool)  # where a new document starts and the state is cleared: nowhere
h = rg_lru(*(v.reshape(column) for v in (inputs, r, i)), rate, starts)[0, :, 0]

fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.2, 3.6), sharex=True, height_ratios=[2, 1])
top.bar(np.arange(length), inputs, color="0.75", label="input $x_t$")
top.plot(h, color="C0", label="state $h_t$")
top.set_ylabel("value")
top.legend(loc="upper right")
bottom.step(np.arange(length), r, where="mid", color="C1", label="recurrence gate $r_t$")
bottom.step(np.arange(length), i, where="mid", color="C2", label="input gate $i_t$")
bottom.set(xlabel="time t", ylabel="gate", ylim=(-0.1, 1.9))
bottom.legend(loc="upper left", ncols=2)

assert (h[20:60] == h[20]).all()  # held without loss
assert abs(h[20] - 1.5) < 0.1
assert np.abs(h[61:]).max() < 0.5  # forgotten again

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
# So compose each step with the one before it, all at the same time: now every entry covers two steps. Compose
# each with the entry two before it: four steps. After $\log_2 L$ **rounds** every entry covers everything
# from the start. This is a *parallel scan*; `doubling_scan` returns the values after every round.
#
# The picture feeds it one impulse for each time $s$, as columns of a matrix, with $a_t = 0.85$. Row $t$ then
# shows how much of which input has arrived in $h_t$.

# %%
length = 32
rounds = doubling_scan(np.full((length, length), 0.85), np.eye(length))

fig, axes = plt.subplots(1, len(rounds), figsize=(9, 2.1), sharey=True, layout="compressed")
for number, (ax, reached) in enumerate(zip(axes, rounds, strict=True)):
    ax.imshow(reached, vmin=-1, vmax=1, aspect="equal")
    ax.set(title=f"after round {number}" if number else "at first", xlabel="input time s")
    covered = min(2**number, length)
    assert (np.count_nonzero(reached, axis=1) == np.minimum(np.arange(length) + 1, covered)).all()
axes[0].set_ylabel("output time t")

assert len(rounds) == 1 + np.log2(length)

# %% [markdown]
# Five rounds for 32 steps, seventeen for 100,000. The result is that of the loop, also with factors that
# change. On a CPU with few cores the plain loop is faster all the same, and `hyena_jax.ops.linear_recurrence`
# takes it there; scans are for devices that compute thousands of entries at a time.

# %%
a, x = rng.uniform(0.2, 1, (100, 3)), rng.normal(size=(100, 3))
loop, last = linear_recurrence(a[None], x[None], np.zeros((1, 3)))
in_jax, _ = associative_recurrence(jnp.float32(a[None]), jnp.float32(x[None]), jnp.zeros((1, 3)))

assert np.allclose(doubling_scan(a, x)[-1], loop[0])
assert np.allclose(in_jax, loop, atol=1e-4)

# %% [markdown]
# ## The whole block
#
# Hawk puts the recurrence into one of two branches:
#
# $$y = W_o \big( \mathrm{GELU}(W_g x) \odot \mathrm{RGLRU}(\mathrm{FIR}_4(W_r x)) \big).$$
#
# $W_g$, $W_r$, $W_o$ are dense layers, $\mathrm{FIR}_4$ a short convolution of four taps, and the left branch
# gates what the recurrence remembers. In NumPy, and by the Flax module with the same parameters:

# %%
config = HawkConfig()
module = Hawk(d_model=16, max_len=64, config=config)
x = rng.normal(size=(2, 64, 16)).astype(np.float32)
params = module.init(jax.random.key(0), x)["params"]
parallel = module.apply({"params": params}, x)

one_document = np.zeros((2, 64))  # all tokens of a sequence belong to one text
in_numpy = hawk(config, jax.tree.map(np.asarray, params), x, 64, one_document)

assert np.allclose(in_numpy, parallel, atol=1e-5)

# %% [markdown]
# For training the block sees the whole sequence. For decoding it takes one token at a time and carries its
# state: the last three inputs of the FIR, and $h$. Both give the same values, and the state never grows,
# which is why such models decode long texts cheaply.

# %%
bound = module.bind({"params": params})
state = bound.init_state(2, 64)
step = jax.jit(lambda state, token: module.apply({"params": params}, state, token, method="step"))
outputs = []
for t in range(64):
    state, y = step(state, x[:, t])
    outputs.append(y)
numbers = state.short_history[0].size + state.h[0].size
print(
    f"a state of {numbers} numbers; attention would keep {64 * 2 * 16:,} after 64 tokens, and more after each"
)

assert np.allclose(np.stack(outputs, axis=1), parallel, atol=1e-5)
assert numbers == 3 * 16 + 16

# %% [markdown]
# How long does a freshly initialised block remember? The factors start with $a$ between 0.9 and 0.999, so
# $a^{8 r_t}$ covers short and long memories from the beginning; training moves them.

# %%
a = np.exp(-np.log1p(np.exp(np.float64(params["rate"]))))
memory = -1 / np.log(a**4)  # with the gate half open, 8 r = 4

fig, ax = plt.subplots(figsize=(7.2, 2))
ax.bar(range(16), np.sort(memory))
ax.set(xlabel="channel, sorted", ylabel="memory (steps)", xticks=range(16))
ax.set_title("with the recurrence gate half open")

assert 0.9 <= a.min() < a.max() <= 0.999

# %% [markdown]
# ## What to take along
#
# - $h_t = a_t h_{t-1} + \dots$: the factor $a_t$ is the memory, and Hawk computes it from the input.
# - $\sqrt{1 - a_t^2}$ keeps the state at the size of the input, however long it remembers, for inputs that
#   are independent from step to step.
# - Step by step for decoding, in $\log_2 L$ rounds as a scan: the same values.
#
# Next: [two relatives of attention](6_linear_attention.ipynb).
