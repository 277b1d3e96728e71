"""Distils a language model: its long filters become modal ones, and the errors of that are measured.

Axes: B batch, N filters of a mixer, D channels of a filter, C = N D, L = max_len, d modes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax import models, parallel
from hyena_jax.config import (
    Experiment,
    FilterConfig,
    GroupedOptimizerConfig,
    LanguageModelConfig,
    MixerConfig,
    ModalFilterConfig,
    ModelConfig,
    ParallelConfig,
    ParameterGroup,
    name_of,
)
from hyena_jax.data.text import Corpus
from hyena_jax.distillation import modal_fit
from hyena_jax.ops import hankel
from hyena_jax.system.errors import UserError, require
from hyena_jax.training.evaluate import held_out_values, sum_held_out
from hyena_jax.training.lora import without_lora
from hyena_jax.training.loss import at_positions
from hyena_jax.training.metrics import Values
from hyena_jax.training.step import Batch, Metrics, make_eval_step

# The shortest length with a Hankel matrix of at least one row.
LEAST_LEN = 4
# No weight decay of poles and residues.
FILTERS = ParameterGroup(r"/mixer/filter/", weight_decay=0.0)


class LongFilters(NamedTuple):
    """The filters h [N, D, L] of one layer, float64."""

    layer: int
    taps: np.ndarray

    @property
    def later(self) -> np.ndarray:
        """h_1 .. h_{L-1} [C, L-1], which the recurrence approximates; h_0 is kept."""
        return self.taps[..., 1:].reshape(-1, self.taps.shape[-1] - 1)


def check_distillable(config: ModelConfig) -> None:
    """Raises UserError unless some mixer has a long filter, and every one of these uses it in one block."""
    kind = name_of(config)
    require(isinstance(config, LanguageModelConfig), "workdir", kind, "a run of a language_model")
    used = config.pattern[: config.n_layers]
    with_filters = [mixer for mixer in used if _has_filter(mixer)]
    names = ", ".join(dict.fromkeys(map(name_of, used)))
    require(bool(with_filters), "workdir", names, "a run with a mixer that has a long filter")
    for mixer in with_filters:
        n_blocks = getattr(mixer, "n_blocks", 1)
        if n_blocks != 1:
            raise UserError(
                f"must be 1 to be distilled, got {n_blocks}: a recurrence continues across blocks", "n_blocks"
            )
    require(config.max_len >= LEAST_LEN, "max_len", config.max_len, f"at least {LEAST_LEN}")


def long_filters(config: LanguageModelConfig, params: optax.Params) -> list[LongFilters]:
    """The filters of every layer with long filters, as the model evaluates them.

    The model's module must have `blocks`, and their mixers' modules a `filter`.
    """
    # Rematerialisation would wrap each block and hide its parts.
    bound = models.build(replace(config, remat="none")).bind({"params": params})
    name = type(bound).__name__
    require(hasattr(bound, "blocks"), "model", name, "a module with `blocks`, as LanguageModel has them")
    return [
        LongFilters(i, _taps(block.mixer, config.max_len))
        for i, block in enumerate(bound.blocks)
        if _has_filter(block.mixer_config)
    ]


def _taps(mixer: nn.Module, length: int) -> np.ndarray:
    name = type(mixer).__name__
    filter_module = getattr(mixer, "filter", None)
    can = isinstance(filter_module, nn.Module)
    require(can, "mixer", name, "a module whose long filter is its submodule `filter`, made in setup")
    taps = np.asarray(filter_module(length), np.float64)
    is_filter = taps.ndim == 3 and taps.shape[-1] == length
    require(is_filter, f"the filter of mixer {name}", taps.shape, f"[N, D, {length}]")
    return taps


def distilled_experiment(experiment: Experiment, n_modes: int) -> Experiment:
    """The experiment with modal filters of d modes, and an optimizer that does not decay them.

    All parameter groups become optional, since groups for the old filters may match nothing now.
    """
    modal = ModalFilterConfig(n_modes=n_modes)
    pattern = tuple(
        replace(mixer, filter=modal) if _has_filter(mixer) else mixer for mixer in experiment.model.pattern
    )
    optimizer = experiment.optimizer
    if isinstance(optimizer, GroupedOptimizerConfig):
        groups = tuple(replace(group, optional=True) for group in (*optimizer.groups, FILTERS))
        optimizer = replace(optimizer, groups=groups)
    model = replace(without_lora(experiment).model, pattern=pattern)
    return replace(experiment, model=model, optimizer=optimizer)


def distilled_params(
    params: optax.Params, filters: Sequence[LongFilters], fitted: Sequence[modal_fit.FittedModes]
) -> optax.Params:
    """The parameters with the filters of each layer replaced; all others are unchanged."""
    new = dict(params)
    for (layer, taps), modes in zip(filters, fitted, strict=True):
        residue = np.stack([modes.residue.real, modes.residue.imag], axis=-1)
        parts = {"log_decay": modes.log_decay, "angle": modes.angle, "residue": residue}
        modal = {name: part.reshape(*taps.shape[:2], *part.shape[1:]) for name, part in parts.items()}
        modal = {name: part.astype(np.float32) for name, part in (modal | {"lag_zero": taps[..., 0]}).items()}
        block = params[f"blocks_{layer}"]  # whose filter becomes a `filters.state_space.ModalFilter`
        new[f"blocks_{layer}"] = {**block, "mixer": {**block["mixer"], "filter": modal}}
    return new


def _has_filter(mixer: MixerConfig) -> bool:
    """Whether a mixer has a long filter; a filter of few taps decodes in constant time as it is."""
    found = getattr(mixer, "filter", None)
    return isinstance(found, FilterConfig) and found.reach is None


class Original(NamedTuple):
    """The run to distil; `about_data` is the content of its data.json."""

    experiment: Experiment
    step: int
    params: optax.Params
    data: Corpus
    about_data: dict[str, Any]
    filters: list[LongFilters]

    @property
    def max_len(self) -> int:
        """Lmax of the model, the length of its filters."""
        return self.experiment.model.max_len


class Spectra(NamedTuple):
    """Hankel spectra of one layer's filters, from the taps alone and from the taps continued by zeros."""

    alone: hankel.Spectrum
    continued: hankel.Spectrum


class FilterError(NamedTuple):
    """The error of a recurrence for one filter: L2 norms over all lags but 0, relative to the filter's norm.

    `least` is a lower bound for any recurrence of that size, `balanced` an upper bound for balanced
    truncation: see `hankel.least_error` and `hankel.balanced_bound`.
    """

    layer: int
    filter: int
    error: float
    worst_channel: int
    worst_error: float
    least: float
    balanced: float


class Tried(NamedTuple):
    """The model at one state size, its filters and their errors, and its metrics including `kl`."""

    size: int
    experiment: Experiment
    params: optax.Params
    filters: list[LongFilters]
    errors: list[FilterError]
    values: Values


def spectra(filters: LongFilters, n_values: int, seed: int) -> Spectra:
    """Singular values of every channel: at least `n_values`, if there are as many."""
    alone = hankel.spectrum(filters.later, n_values, seed)
    return Spectra(alone, hankel.spectrum(hankel.continued(filters.later), n_values, seed))


def distill(
    original: Original,
    spectra: Sequence[Spectra],
    size: int,
    batch_size: int,
    seed: int,
    advance: Callable[[], None],
) -> Tried:
    """The model whose filters have `size` real numbers of state per channel, with its errors."""
    fitted = []
    for filters in original.filters:
        fitted.append(modal_fit.fit(filters.later, size // 2, seed))
        advance()
    experiment = distilled_experiment(original.experiment, size // 2)
    params = distilled_params(original.params, original.filters, fitted)
    # Errors of the filters that the model computes in float32, not of the float64 fit.
    after = long_filters(experiment.model, params)
    errors = [
        error
        for layer in zip(original.filters, after, spectra, strict=True)
        for error in filter_errors(*layer, size)
    ]
    values = evaluate(original, experiment, params, batch_size)
    advance()
    return Tried(size, experiment, params, after, errors, values)


def filter_errors(before: LongFilters, after: LongFilters, spectra: Spectra, order: int) -> list[FilterError]:
    """The errors of one layer, filter by filter."""
    n_filters, width, length = before.taps.shape

    def by_filter(norms: np.ndarray) -> np.ndarray:
        return norms.reshape(n_filters, width)

    norm = by_filter(np.linalg.norm(before.later, axis=1))
    error = by_filter(np.linalg.norm(after.later - before.later, axis=1))
    least = by_filter(hankel.least_error(spectra.alone, length - 1, order))
    bound = by_filter(hankel.balanced_bound(spectra.continued, order))
    # A zero filter has no relative error.
    scale = np.maximum(norm, np.finfo(np.float32).tiny)
    total = np.linalg.norm(scale, axis=1)
    worst = (error / scale).argmax(1)
    return [
        FilterError(
            layer=before.layer,
            filter=i,
            error=float(np.linalg.norm(error[i]) / total[i]),
            worst_channel=int(worst[i]),
            worst_error=float((error / scale)[i, worst[i]]),
            least=float(np.linalg.norm(least[i]) / total[i]),
            balanced=float(np.linalg.norm(bound[i]) / total[i]),
        )
        for i in range(n_filters)
    ]


def make_comparison_step(model: nn.Module, other: nn.Module) -> Callable[[tuple, Batch], Metrics]:
    """`step((params, other_params), batch)`: per row the sums of `make_eval_step` for `other`, and `kl`.

    kl [B] sums KL(model || other) of next-token distributions, nats, over a row's tokens or scored positions.
    """
    eval_other = make_eval_step(other)

    def step(params: tuple[optax.Params, optax.Params], batch: Batch) -> Metrics:
        log_p, log_q = (
            jax.nn.log_softmax(at_positions(module.apply({"params": part}, batch["inputs"]), batch))
            for module, part in zip((model, other), params, strict=True)
        )
        return {
            **eval_other(params[1], batch),
            "kl": (batch["weights"] * kl_divergence(log_p, log_q)).sum(-1),
        }

    return step


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p || q) = sum_v (p_v ln(p_v / q_v) - p_v + q_v) [...] of logarithms [..., V]; never negative.

    The terms q_v - p_v, whose sum is 0, make each summand at least 0, and cancel first-order terms before
    rounding where p and q are close.
    """
    p, ratio = jnp.exp(log_p), log_q - log_p
    near, far = p * (jnp.expm1(ratio) - ratio), jnp.exp(log_q) - p - p * ratio
    return jnp.where(jnp.abs(ratio) < 1, near, far).sum(-1)


def evaluate(original: Original, experiment: Experiment, params: optax.Params, batch_size: int) -> Values:
    """Metrics of a model on all held-out tokens, and `kl`, the mean KL(original || model) in nats."""
    strategy = parallel.make_strategy(ParallelConfig())
    both = (models.build(one.model) for one in (original.experiment, experiment))
    step = strategy.map_eval_step(make_comparison_step(*both))
    placed = strategy.place((original.params, params))
    sums = sum_held_out(strategy, step, placed, original.data, batch_size)
    return held_out_values(original.data, sums)
