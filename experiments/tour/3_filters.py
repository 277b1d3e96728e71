# %% [markdown]
# # 3. Explicit, implicit and state-space filters
#
# A long convolution needs a filter $h_0, h_1, \dots, h_{L-1}$ for each channel. Where does it come from?
# There are three answers, and they differ in how many parameters they train, how smooth the filters are, and
# how cheaply a model decodes with them.
#
# The filters below are freshly initialised modules of `hyena_jax.filters`. Each is computed a second time, in
# plain NumPy float64, from the same parameters.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.config import ExplicitFilterConfig, ImplicitFilterConfig, S4DFilterConfig
from hyena_jax.filters import build_filter
from hyena_jax.reference import filters as reference
from hyena_jax.reference.convolution import linear_convolution
from hyena_jax.reference.decoding import modal_convolution

plt.style.use("tour.mplstyle")
LENGTH, CHANNELS = 256, 4
lag = np.arange(LENGTH)


def initialised(config, max_len=LENGTH, seed=0):
    """The parameters of one filter for each channel, and the filters [1, D, max_len]."""
    module = build_filter(1, CHANNELS, max_len, config)
    variables = module.init(jax.random.key(seed), max_len)
    taps = np.asarray(module.apply(variables, max_len))
    return jax.tree.map(np.asarray, variables["params"]), taps


def count(params, without=()):
    """The numbers in a tree of parameters."""
    return sum(
        leaf.size for name, tree in params.items() if name not in without for leaf in jax.tree.leaves(tree)
    )


# %% [markdown]
# ## Explicit: every tap is a parameter
#
# The simplest answer: $h_s$ *is* the parameter. That is the layer of a convolutional network, with as many
# taps as you can afford. A filter of length $L$ has $L$ parameters for each channel, it starts as noise, and
# nothing ties neighbouring taps to each other.

# %%
config = ExplicitFilterConfig()
explicit_params, explicit = initialised(config)

assert np.allclose(explicit, reference.explicit(explicit_params, 1, LENGTH, LENGTH, config))
assert count(explicit_params) == CHANNELS * LENGTH

# %% [markdown]
# ## Implicit: a small network computes the taps
#
# Hyena asks a small network for the tap at each lag $s$ (Poli et al. 2023):
#
# $$h_s = \underbrace{\mathrm{MLP}(z_s)}_{\text{network}} \odot
#   \underbrace{e^{-s\,\delta/(L-1)}}_{\text{window}}, \qquad
#   z_s = \Big(\tfrac{s}{L-1},\; \cos\tfrac{2\pi f s}{L},\;
#   -\sin\tfrac{2\pi f s}{L}\Big)_{f = 0, 1, 2, \dots}$$
#
# - $z_s$ are **positional features**: the lag itself, and waves of a few frequencies $f$.
# - The network has $\sin(\omega x)$ as its activation, with a large trainable $\omega$. It makes fast wiggles
#   easy. With smoother activations the filters start too smooth and learn less.
# - The window lets every filter fade, each channel at its own rate $\delta$: some remember for long, some
#   briefly.
#
# The picture follows the taps from left to right.

# %%
config = ImplicitFilterConfig(emb_dim=9, width=32)
implicit_params, implicit = initialised(config)
features = reference.positional_features(LENGTH, config)
rates = np.abs(reference.decay_rates(config, CHANNELS))
window = np.exp(-rates[:, None] * lag / (LENGTH - 1))

fig, axes = plt.subplots(1, 4, figsize=(8.4, 2.3))
axes[0].imshow(features.T, vmin=-1, vmax=1)
axes[0].set(title="features $z_s$", ylabel="feature")
for channel in range(CHANNELS):
    axes[1].plot(implicit[0, channel] / window[channel], linewidth=0.9)
    axes[2].plot(window[channel])
    axes[3].plot(implicit[0, channel], linewidth=0.9)
for ax, title in zip(axes[1:], ("network's output", "window", "filter $h_s$"), strict=True):
    ax.set_title(title)
for ax in axes:
    ax.set_xlabel("lag s")

assert np.allclose(implicit, reference.implicit(implicit_params, 1, LENGTH, LENGTH, config), atol=1e-5)

# %% [markdown]
# (Each colour is a channel.) The network's size does not depend on the length of the filter. A hundred
# thousand taps cost no more parameters than a hundred: length has become free, in parameters. (The features
# are parameters, too, which hardly move; we do not count them.)

# %%
for length in (64, 256, 4096):
    params, taps = initialised(config, max_len=length)
    print(f"L = {length:4}: network {count(params, ['positions']):,} parameters, explicit taps {taps.size:,}")
    assert count(params, ["positions"]) == count(implicit_params, ["positions"])

# %% [markdown]
# ## State space: a recurrence rings like a bell
#
# The third answer comes from control theory. Keep a **state** $x$ of $N$ numbers. At each time, let the state
# turn and shrink, add the input, and read the output off:
#
# $$x_t = \bar{A}\, x_{t-1} + \bar{B}\, u_t, \qquad y_t = C\, x_t .$$
#
# Strike it once ($u_0 = 1$, then nothing) and listen: $y_s = C \bar{A}^s \bar{B}$. This **impulse response**
# is a filter, $h_s = C \bar{A}^s \bar{B}$, and the recurrence computes the convolution with it. S4D takes a
# diagonal $\bar{A}$ of complex numbers $\lambda_n$ inside the unit circle: each **mode** $\lambda_n^s$ is a
# decaying wave, $|\lambda_n|$ says how fast it fades and its angle how fast it turns:
#
# $$h_s = 2\,\mathrm{Re} \sum_{n} C_n \, \lambda_n^s \, \bar{B}_n .$$

# %%
config = S4DFilterConfig(n_state=16)
s4d_params, s4d = initialised(config)
a = -np.exp(s4d_params["log_decay"]) + 1j * s4d_params["frequency"]  # [1, D, n_state / 2]
dt = np.exp(s4d_params["log_dt"])[..., None]  # step size of each channel
mode = ((1 + dt * a / 2) / (1 - dt * a / 2))[0]

fig, (left, right) = plt.subplots(1, 2, width_ratios=[1, 2.2])
angle = np.linspace(0, np.pi, 200)
left.plot(np.cos(angle), np.sin(angle), color="0.8")
for channel in range(CHANNELS):
    left.plot(mode[channel].real, mode[channel].imag, "o", color=f"C{channel}")
    right.plot(s4d[0, channel], linewidth=1, label=f"channel {channel}")
left.set(title=r"modes $\lambda_n$", xlabel="real part", ylabel="imaginary part", xlim=(-0.1, 1.1))
right.set(title="their filters", xlabel="lag s", ylabel="$h_s$")
right.legend()

assert np.allclose(s4d, reference.s4d(s4d_params, 1, LENGTH, LENGTH, config), atol=1e-4)
assert (np.abs(mode) < 1).all()

# %% [markdown]
# Modes close to the circle and close to the real axis ring long and low; modes further round turn faster.
#
# The point of the state: **a convolution with this filter needs no history.** Here is the first channel as a
# recurrence that keeps eight complex numbers, next to the sum over all earlier inputs. (`modal_convolution`
# reads the output before it updates the state, so $h_0$ stands apart and the others start at $\lambda^0$.)

# %%
u = np.random.default_rng(0).normal(size=LENGTH)
b = dt[0, 0] * (s4d_params["b"] @ [1, 1j])[0, 0] / (1 - dt[0, 0] * a[0, 0] / 2)
c = (s4d_params["c"] @ [1, 1j])[0, 0]
residue = 2 * c * b * mode[0]
recurrent = modal_convolution(u, s4d[0, 0, 0], residue, mode[0])
convolved = linear_convolution(u, s4d[0, 0])[:LENGTH]

fig, ax = plt.subplots(figsize=(7.2, 2))
ax.plot(convolved, color="C0", linewidth=3, alpha=0.4, label="convolution with the filter")
ax.plot(recurrent, "--", color="C1", label="recurrence with 8 complex numbers")
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend()

assert np.allclose(recurrent, convolved, atol=1e-4)

# %% [markdown]
# ## Side by side
#
# One channel of each at initialisation, and its spectrum: the DFT of the filter says how strongly each
# frequency passes (notebook 1). The *effective length* is the number of lags that hold 99% of the filter's
# energy $\sum_s h_s^2$.

# %%
families = {"explicit": explicit[0, 0], "implicit": implicit[0, 0], "state space": s4d[0, 0]}
fig, axes = plt.subplots(2, 3, figsize=(7.6, 3.4), sharex="row")
effective = {}
for column, (name, h) in enumerate(families.items()):
    energy = np.cumsum(h**2) / np.sum(h**2)
    effective[name] = int(np.argmax(energy >= 0.99)) + 1
    axes[0, column].plot(h, color=f"C{column}", linewidth=0.9)
    axes[0, column].set(title=f"{name}: {effective[name]} lags", xlabel="lag s")
    axes[1, column].semilogy(np.abs(np.fft.rfft(h)), color=f"C{column}", linewidth=0.9)
    axes[1, column].set_xlabel("frequency k")
axes[0, 0].set_ylabel("$h_s$")
axes[1, 0].set_ylabel("$|H_k|$")

assert effective["explicit"] > 0.9 * LENGTH  # noise everywhere
assert effective["implicit"] < LENGTH  # the window

# %% [markdown]
# | | parameters a channel | memory while decoding | module |
# |---|---|---|---|
# | explicit | $L$ | all earlier inputs | `filters.explicit` |
# | implicit | a share of one network | all earlier inputs | `filters.implicit` |
# | state space | about $3N$ | $N$ numbers | `filters.state_space` |
#
# ## What to take along
#
# - A filter may be free taps, the output of a network at each lag, or the ringing of a recurrence.
# - Only the third decodes with a state of fixed size. [Notebook 7](7_decoding.ipynb) turns the others into
#   the third.
#
# Next: [Hyena](4_hyena.ipynb), which puts gates between long convolutions.
