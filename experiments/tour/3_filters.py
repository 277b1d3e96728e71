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
import numpy as np
import show
from loops import linear_convolution, modal_convolution

from hyena_jax.config import ExplicitFilterConfig, ImplicitFilterConfig, S4DFilterConfig
from hyena_jax.filters import build_filter
from hyena_jax.filters.implicit import CKConvFilter, ImplicitFilter
from hyena_jax.inspect import effective_length
from hyena_jax.reference import filters as reference

LENGTH, CHANNELS = 256, 4
lag = np.arange(LENGTH)


def initialised(config, max_len=LENGTH):
    """The parameters of one filter for each channel, and the filters [1, D, max_len]."""
    module = build_filter(1, CHANNELS, max_len, config)
    taps, variables = module.init_with_output(jax.random.key(0), max_len)
    return jax.tree.map(np.asarray, variables["params"]), np.asarray(taps)


def count(params):
    """The numbers in a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# %% [markdown]
# ## Explicit: every tap is a parameter
#
# The simplest answer: $h_s$ *is* the parameter. That is the layer of a convolutional network, with as many
# taps as you can afford. A filter of length $L$ has $L$ parameters for each channel, it starts as noise, and
# nothing ties neighbouring taps to each other.

# %%
explicit_config = ExplicitFilterConfig()
explicit_params, explicit = initialised(explicit_config)

# %% [markdown]
# ## Implicit: a small network computes the taps
#
# Hyena asks a small network for the tap at each lag $s$:
#
# $$h_s = \underbrace{\mathrm{MLP}(z_s)}_{\text{network}} \odot
#   \underbrace{e^{-s\,\delta/(L-1)}}_{\text{window}}, \qquad
#   z_s = \Big(\tfrac{s}{L-1},\; \underbrace{\cos\tfrac{2\pi f s}{L}}_{f = 0, \dots, F-1},\;
#   \underbrace{-\sin\tfrac{2\pi f s}{L}}_{f = 0, \dots, F-1}\Big)$$
#
# [Poli et al. 2023, section 3.3 and appendix A.3](https://arxiv.org/abs/2302.10866). Oracles:
# [`implicit`](../../hyena_jax/reference/filters.py) and
# [`positional_features`](../../hyena_jax/reference/filters.py). Code:
# [`ImplicitFilter`](../../hyena_jax/filters/implicit.py).
#
# - $z_s$ are **positional features**: the lag itself, and waves of the first $F$ frequencies $f$.
# - The network has $\sin(\omega x)$ as its activation, with a trainable $\omega$ that is 14 at the start. The
#   larger $\omega$ is, the faster a filter can change from lag to lag.
# - The window fades, in each channel at its own rate $\delta$: some channels remember for long, some briefly.
#
# In the code $s/(L-1)$ is `time` and $\delta$ is `decay`:

# %%
show.code(CKConvFilter._network, ImplicitFilter.__call__)

# %% [markdown]
# The picture follows the taps from left to right. Row 0 of the features is the lag, rows 1 to 4 are the
# cosines and rows 5 to 8 the sines, with $F = 4$; rows 1 and 5 have the frequency 0 and are constant.

# %%
implicit_config = ImplicitFilterConfig(emb_dim=9, width=32)
implicit_params, implicit = initialised(implicit_config)
features = reference.positional_features(LENGTH, implicit_config)
rates = np.abs(reference.decay_rates(implicit_config, CHANNELS))
window = np.exp(-rates[:, None] * lag / (LENGTH - 1))
network = implicit[0] / window  # the module returns the product alone


def by_channel(values):
    return {f"channel {channel}": row for channel, row in enumerate(values)}


axes = show.panels(4)
show.matrices({"features $z_s$": features.T}, ax=axes[0], aspect="auto", xlabel="lag s", ylabel="row")
show.lines(network.T, ax=axes[1], xlabel="lag s", title="MLP($z_s$)")
show.lines(by_channel(window), ax=axes[2], xlabel="lag s", title="window")
show.lines(implicit[0].T, ax=axes[3], xlabel="lag s", title="filter $h_s$")

# %% [markdown]
# The network's size does not depend on the length of the filter. The table of features does: this module, as
# the published code, stores it as parameters, 9 numbers for each lag whatever the number of channels. With
# hundreds of channels that is little against the explicit taps; with the four here it is more.

# %%
counts = {}
for length in (64, 256, 4096):
    params, _ = initialised(implicit_config, length)
    table = params.pop("positions").size
    counts[length] = count(params), table, CHANNELS * length
    print(
        "L = {:4}: network {:,}, table of features {:6,}, explicit taps {:6,}".format(length, *counts[length])
    )

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
# [Gu et al. 2022, section 2](https://arxiv.org/abs/2206.11893). Oracles:
# [`s4d`](../../hyena_jax/reference/filters.py), [`s4d_modes`](../../hyena_jax/reference/filters.py). Code:
# [`S4DFilter`](../../hyena_jax/filters/state_space.py),
# [`modal_response`](../../hyena_jax/ops/modal_conv.py).
#
# What is trained is a system in continuous time, $x' = a x + b u$, with a step size $\Delta$ for each
# channel. The *bilinear rule* turns it into steps: $\lambda = (1 + \Delta a/2) / (1 - \Delta a/2)$ and
# $\bar{B} = \Delta b / (1 - \Delta a/2)$. A real part of $a$ below 0 puts $\lambda$ inside the circle.

# %%
show.code(reference.s4d_modes, reference.s4d)

# %%
s4d_config = S4DFilterConfig(n_state=16)
s4d_params, s4d = initialised(s4d_config)
mode, residue = (values[0] for values in reference.s4d_modes(s4d_params))  # [D, n_state / 2]
quarter = np.exp(1j * np.linspace(0, np.pi / 2, 200))

left, right = show.panels(2, height=2.7, width_ratios=[1, 2])
points = {"unit circle": (quarter.real, quarter.imag), "modes of channel 0": (mode[0].real, mode[0].imag)}
points |= {"modes of channel 1": (mode[1].real, mode[1].imag)}
labels = {"xlabel": "real part", "ylabel": "imaginary part", "aspect": "equal"}
show.lines(points, styles=("pale", "o", "s"), ax=left, **labels)
show.lines(by_channel(s4d[0, :2]), ax=right, xlabel="lag s", ylabel="$h_s$", title="their filters")

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

curves = {"convolution with the filter": convolved, "recurrence with 8 complex numbers": recurrent}
show.lines(curves, styles=("thick", "--"), xlabel="time t", ylabel="$y_t$", ylim=(-2.5, 4))

# %%
show.code(modal_convolution)

# %% [markdown]
# ## Side by side
#
# One channel of each at initialisation, and its spectrum: the DFT of the filter says how strongly each
# frequency passes (notebook 1). The *effective length* is the number of lags, from 0, that hold 95% of the
# filter's energy $\sum_s h_s^2$. How long an implicit filter is depends on its channel's window: the picture
# has channel 1, and the cell prints the effective lengths of all four.

# %%
families = {"explicit": explicit[0, 0], "implicit": implicit[0, 1], "state space": s4d[0, 0]}
lengths = {name: effective_length(h) for name, h in families.items()}

axes = show.panels(3, 2, height=3.4)
for column, (name, h) in enumerate(families.items()):
    title = f"{name}: 95% in {lengths[name]} lags"
    show.lines(h, ax=axes[0, column], title=title, xlabel="lag s", ylabel="$h_s$")
    show.lines(abs(np.fft.rfft(h)), logs="y", ax=axes[1, column], xlabel="frequency k", ylabel="$|H_k|$")
of_channels = effective_length(implicit[0])
print("effective lengths of the implicit filters:", *of_channels)

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
# - Only the third decodes with a state of fixed size. [Notebook 8](8_decoding.ipynb) turns the others into
#   the third.
#
# Next: [Hyena](4_hyena.ipynb), which puts gates between long convolutions.
#
# ## Checks

# %%
# Each module is its oracle.
assert np.allclose(explicit, reference.explicit(explicit_params, 1, LENGTH, LENGTH, explicit_config))
expected = reference.implicit(implicit_params, 1, LENGTH, LENGTH, implicit_config)
assert np.allclose(implicit, expected, atol=1e-5)
assert np.allclose(s4d, reference.s4d(s4d_params, 1, LENGTH, LENGTH, s4d_config), atol=1e-4)
# The features are those of the equation, but that the module's first f is 0.0001, not 0.
waves = 2 * np.pi * np.outer(lag, np.arange(4)) / LENGTH
equation = np.hstack([lag[:, None] / (LENGTH - 1), np.cos(waves), -np.sin(waves)])
assert np.allclose(features, equation, atol=1e-3)
assert (implicit_params["sine_frequency"] == 14).all()
# The network does not grow with L; the table does, and is little against the taps of 256 channels.
assert len({of_network for of_network, _, _ in counts.values()}) == 1
assert all(taps < table == 9 * length < 0.05 * 256 * length for length, (_, table, taps) in counts.items())
assert count(explicit_params) == CHANNELS * LENGTH
# The modes are inside of the circle, and the filter is their sum and a recurrence.
assert (abs(mode) < 1).all()
assert np.allclose(s4d[0], (residue[..., None] * mode[..., None] ** lag).real.sum(axis=1), atol=1e-4)
assert mode[0].size == 8
assert np.allclose(recurrent, convolved, atol=1e-4)
# Noise everywhere; a window; and channel 0 has the slowest one.
assert lengths["explicit"] > 0.9 * LENGTH
assert lengths["implicit"] < 0.5 * LENGTH
assert of_channels[0] > 2 * max(of_channels[1:])
