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
from hyena_jax.inspect import effective_length
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
#   z_s = \Big(\tfrac{s}{L-1},\; \underbrace{\cos\tfrac{2\pi f s}{L}}_{f = 0, \dots, F-1},\;
#   \underbrace{-\sin\tfrac{2\pi f s}{L}}_{f = 0, \dots, F-1}\Big)$$
#
# - $z_s$ are **positional features**: the lag itself, and waves of the first $F$ frequencies $f$.
# - The network has $\sin(\omega x)$ as its activation, with a trainable $\omega$ that is 14 at the start. The
#   larger $\omega$ is, the faster a filter can change from lag to lag.
# - The window fades, in each channel at its own rate $\delta$: some channels remember for long, some briefly.
#
# The picture follows the taps from left to right. Row 0 of the features is the lag, rows 1 to 4 are the
# cosines and rows 5 to 8 the sines, with $F = 4$; rows 1 and 5 have the frequency 0 and are constant.

# %%
config = ImplicitFilterConfig(emb_dim=9, width=32)
implicit_params, implicit = initialised(config)
features = reference.positional_features(LENGTH, config)
rates = np.abs(reference.decay_rates(config, CHANNELS))
window = np.exp(-rates[:, None] * lag / (LENGTH - 1))

network = implicit[0] / window  # the module returns the product alone

fig, axes = plt.subplots(1, 4, figsize=(9.2, 2.2))
image = axes[0].imshow(features.T, vmin=-1, vmax=1)
axes[0].set(title="features $z_s$", ylabel="row", yticks=range(9))
fig.colorbar(image, ax=axes[0], ticks=[-1, 0, 1])
for channel in range(CHANNELS):
    axes[1].plot(network[channel], linewidth=0.9)
    axes[2].plot(window[channel], label=f"channel {channel}")
    axes[3].plot(implicit[0, channel], linewidth=0.9)
axes[1].set(title="network's output", ylabel="MLP($z_s$)")
axes[2].set(title="window", ylabel="factor")
axes[2].legend()
axes[3].set(title="filter", ylabel="$h_s$")
for ax in axes:
    ax.set_xlabel("lag s")

waves = 2 * np.pi * np.outer(lag, np.arange(4)) / LENGTH
assert np.allclose(features[:, 0], lag / (LENGTH - 1))
assert np.allclose(features[:, 1:5], np.cos(waves), atol=1e-3)  # the module's first f is 0.0001, not 0
assert np.allclose(features[:, 5:], -np.sin(waves), atol=1e-3)
assert (implicit_params["sine_frequency"] == 14).all()
assert np.allclose(implicit, reference.implicit(implicit_params, 1, LENGTH, LENGTH, config), atol=1e-5)

# %% [markdown]
# The network's size does not depend on the length of the filter. The table of features does: this module, as
# the published code, stores it as parameters, 9 numbers for each lag whatever the number of channels. With
# hundreds of channels that is little against the explicit taps; with the four here it is more.

# %%
for length in (64, 256, 4096):
    params, taps = initialised(config, max_len=length)
    network, table = count(params, ["positions"]), params["positions"].size
    print(f"L = {length:4}: network {network:,}, table of features {table:6,}, explicit taps {taps.size:6,}")
    assert network == count(implicit_params, ["positions"])
    assert table == 9 * length > taps.size
    assert table < 0.05 * 256 * length  # the taps of 256 channels

# %% [markdown]
# ## State space: a recurrence rings like a bell
#
# The third answer comes from control theory. Keep a **state** $x$ of $N$ numbers (its letter there; it is not
# the gate of notebook 1). At each time, let the state turn and shrink, add the input, and read the output
# off:
#
# $$x_t = \bar{A}\, x_{t-1} + \bar{B}\, u_t, \qquad y_t = C\, x_t .$$
#
# Strike it once ($u_0 = 1$, then nothing) and listen: $y_s = C \bar{A}^s \bar{B}$. This **impulse response**
# is a filter, $h_s = C \bar{A}^s \bar{B}$, and the recurrence computes the convolution with it. S4D takes a
# diagonal $\bar{A}$ of complex numbers $\lambda_n$ inside the unit circle: each **mode** $\lambda_n^s$ is a
# decaying wave, $|\lambda_n|$ says how fast it fades and its angle how fast it turns. The $\lambda_n$ come in
# conjugate pairs, so that the sum is real; we keep one of each pair, and $2\,\mathrm{Re}$ adds its partner:
#
# $$h_s = 2\,\mathrm{Re} \sum_{n=1}^{N/2} C_n \, \lambda_n^s \, \bar{B}_n
#   = \mathrm{Re} \sum_{n=1}^{N/2} R_n \, \lambda_n^s, \qquad R_n = 2\, C_n \bar{B}_n .$$
#
# What is trained is a system in continuous time, $x' = a x + b u$, with a step size $\Delta$ for each
# channel. The *bilinear rule* turns it into steps: $\lambda = (1 + \Delta a/2) / (1 - \Delta a/2)$ and
# $\bar{B} = \Delta b / (1 - \Delta a/2)$. A real part of $a$ below 0 puts $\lambda$ inside the circle. The
# function `s4d_modes` returns all $\lambda_n$ and residues $R_n$.

# %%
config = S4DFilterConfig(n_state=16)
s4d_params, s4d = initialised(config)
mode, residue = (values[0] for values in reference.s4d_modes(s4d_params))  # [D, n_state / 2]

fig, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.7), width_ratios=[1, 2])
angle = np.linspace(0, np.pi / 2, 200)
left.plot(np.cos(angle), np.sin(angle), color="0.7", linewidth=1, label="unit circle")
for channel in range(CHANNELS):
    left.plot(mode[channel].real, mode[channel].imag, "o", markersize=2.5, color=f"C{channel}")
    right.plot(s4d[0, channel], linewidth=1, label=f"channel {channel}")
left.set(title=r"modes $\lambda_n$", xlabel="real part", ylabel="imaginary part", aspect="equal")
left.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
left.legend(loc="lower left")
right.set(title="their filters", xlabel="lag s", ylabel="$h_s$")
right.legend()

waves = (residue[..., None] * mode[..., None] ** lag).real.sum(axis=1)
assert np.allclose(s4d[0], waves, atol=1e-4)
assert np.allclose(s4d, reference.s4d(s4d_params, 1, LENGTH, LENGTH, config), atol=1e-4)
assert (np.abs(mode) < 1).all()

# %% [markdown]
# Modes close to the circle and close to the real axis ring long and low; modes further round turn faster.
#
# The point of the state: **a convolution with this filter needs no history.** Here is the first channel as a
# recurrence that keeps eight complex numbers, next to the sum over all earlier inputs. (`modal_convolution`
# reads the output before it updates the state, so $h_0$ stands apart and the others start at $\lambda^0$:
# their residues are $R_n \lambda_n$.)

# %%
u = np.random.default_rng(0).normal(size=LENGTH)
recurrent = modal_convolution(u, s4d[0, 0, 0], residue[0] * mode[0], mode[0])
convolved = linear_convolution(u, s4d[0, 0])[:LENGTH]

fig, ax = plt.subplots(figsize=(7.2, 2))
ax.plot(convolved, color="C0", linewidth=3, alpha=0.4, label="convolution with the filter")
ax.plot(recurrent, "--", color="C1", label="recurrence with 8 complex numbers")
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend()

assert mode[0].size == 8
assert np.allclose(recurrent, convolved, atol=1e-4)

# %% [markdown]
# ## Side by side
#
# One channel of each at initialisation, and its spectrum: the DFT of the filter says how strongly each
# frequency passes (notebook 1). The *effective length* is the number of lags, from 0, that hold 95% of the
# filter's energy $\sum_s h_s^2$. How long an implicit filter is depends on its channel's window: the picture
# has channel 1, and the cell prints the effective lengths of all four.

# %%
families = {"explicit": explicit[0, 0], "implicit": implicit[0, 1], "state space": s4d[0, 0]}
fig, axes = plt.subplots(2, 3, figsize=(8, 3.4), sharex="row")
effective = {}
for column, (name, h) in enumerate(families.items()):
    energy = np.cumsum(h**2) / np.sum(h**2)
    effective[name] = int(np.argmax(energy >= 0.95)) + 1
    assert effective[name] == effective_length(h)
    axes[0, column].plot(h, color=f"C{column}", linewidth=0.9)
    axes[0, column].set_title(f"{name}\n95% of energy in {effective[name]} of {LENGTH} lags")
    axes[0, column].set_xlabel("lag s")
    axes[1, column].semilogy(np.abs(np.fft.rfft(h)), color=f"C{column}", linewidth=0.9)
    axes[1, column].set_xlabel("frequency k")
axes[0, 0].set_ylabel("$h_s$")
axes[1, 0].set_ylabel("$|H_k|$")

of_channels = effective_length(implicit[0])
print("effective lengths of the implicit filters:", *of_channels)
assert effective["explicit"] > 0.9 * LENGTH  # noise everywhere
assert effective["implicit"] < 0.5 * LENGTH  # the window
assert of_channels[0] > 2 * max(of_channels[1:])  # channel 0 has the slowest window

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
