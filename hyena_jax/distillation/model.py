"""Turns a language model with long filters into one with modal filters.

Axes: N filters of a mixer, D channels of a filter, C = N D, L = max_len, d modes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
import optax

from hyena_jax import models
from hyena_jax.config import (
    Experiment,
    FilterConfig,
    GroupedOptimizerConfig,
    LanguageModelConfig,
    MixerConfig,
    ModalFilterConfig,
    ModelConfig,
    ParameterGroup,
    name_of,
)
from hyena_jax.distillation import modal_fit
from hyena_jax.system.errors import UserError, require
from hyena_jax.training.lora import without_lora

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
    with_filters = [mixer for mixer in config.pattern if _has_filter(mixer)]
    names = ", ".join(dict.fromkeys(map(name_of, config.pattern)))
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
        block = dict(params[f"blocks_{layer}"])
        block["mixer"] = {**block["mixer"], "filter": _modal_parameters(taps, modes)}
        new[f"blocks_{layer}"] = block
    return new


def _modal_parameters(taps: np.ndarray, modes: modal_fit.FittedModes) -> Mapping[str, Any]:
    """Parameters of `hyena_jax.filters.state_space.ModalFilter`."""
    residue = np.stack([modes.residue.real, modes.residue.imag], axis=-1)
    by_filter = {"log_decay": modes.log_decay, "angle": modes.angle, "residue": residue}
    parameters = {name: part.reshape(*taps.shape[:2], *part.shape[1:]) for name, part in by_filter.items()}
    return {name: part.astype(np.float32) for name, part in (parameters | {"lag_zero": taps[..., 0]}).items()}


def _has_filter(mixer: MixerConfig) -> bool:
    """Whether a mixer has a long filter; a filter of few taps decodes in constant time as it is."""
    found = getattr(mixer, "filter", None)
    return isinstance(found, FilterConfig) and found.reach is None
