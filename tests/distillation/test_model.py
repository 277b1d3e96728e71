"""Which parameters of which layers are replaced, and by what."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distillation.systems import noise
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    AttentionConfig,
    Experiment,
    FilterConfig,
    FIRConfig,
    H3Config,
    HawkConfig,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    MixerConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    S4DConfig,
    ShortFilterConfig,
    TextConfig,
    register,
)
from hyena_jax.distillation import modal_fit, outcome
from hyena_jax.distillation.model import (
    LongFilters,
    check_distillable,
    distilled_experiment,
    distilled_params,
    filter_errors,
    kl_divergence,
    long_filters,
    make_comparison_step,
    spectra,
)
from hyena_jax.filters import build_filter
from hyena_jax.system.errors import UserError
from hyena_jax.training.optimizer import complete_groups, label_parameters, make_optimizer
from hyena_jax.training.step import init_params

L = 12


def model_config(*pattern, n_layers=None, **fields) -> LanguageModelConfig:
    sizes = {"d_model": 4, "d_ff": 4, "max_len": L, "vocab_size": 5}
    return LanguageModelConfig(pattern=pattern, n_layers=n_layers or len(pattern), **{**sizes, **fields})


def experiment_of(model: LanguageModelConfig, *groups: ParameterGroup) -> Experiment:
    return Experiment(model=model, data=TextConfig(seq_len=L), optimizer=AdamWConfig(groups=groups))


def distilled(experiment: Experiment, params, n_modes: int):
    filters = long_filters(experiment.model, params)
    fitted = [modal_fit.fit(layer.later, n_modes) for layer in filters]
    return distilled_experiment(experiment, n_modes), distilled_params(params, filters, fitted)


@pytest.mark.grid
def test_every_kind_of_long_filter_is_found_and_nothing_else_is_touched():
    config = model_config(
        HyenaConfig(order=2, gating="conv_first"), HawkConfig(), H3Config(head_dim=2), FIRConfig(),
    )  # fmt: skip
    params = init_params(models.build(config), 0)
    before = long_filters(config, params)
    assert [(layer.layer, layer.taps.shape) for layer in before] == [
        (0, (2, 4, L)), (2, (1, 2, L)), (3, (1, 4, L))
    ]  # fmt: skip
    # As many modes as taps: only the rounding of the parameters remains.
    experiment, new = distilled(experiment_of(config), params, L)
    after = long_filters(experiment.model, new)
    for old, fitted in zip(before, after, strict=True):
        np.testing.assert_array_equal(fitted.taps[..., 0], old.taps[..., 0])
        np.testing.assert_allclose(fitted.taps, old.taps, atol=1e-4 * np.abs(old.taps).max())
    shapes = jax.eval_shape(lambda: init_params(models.build(experiment.model), 0))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, shapes)
    assert new["blocks_1"] is params["blocks_1"]
    assert new["blocks_2"]["mixer"]["skip"] is params["blocks_2"]["mixer"]["skip"]


def test_the_optimizer_keeps_its_groups_and_does_not_decay_the_filters():
    rate = ParameterGroup(r"/filter/(log_decay|frequency)$", learning_rate=1e-3)
    new = distilled_experiment(experiment_of(model_config(S4DConfig()), rate, *HYENA_GROUPS), 2)
    shapes = jax.eval_shape(lambda: init_params(models.build(new.model), 0))
    make_optimizer(new.optimizer, shapes, 10)  # `frequency` and `positions` are gone
    groups, labels = complete_groups(new.optimizer), label_parameters(new.optimizer.groups, shapes)
    labels = labels["blocks_0"]["mixer"]["filter"]
    assert groups[labels["log_decay"]].learning_rate == 1e-3
    assert {groups[labels[name]].weight_decay for name in ("angle", "residue", "lag_zero")} == {0.0}
    without_groups = OptimizerConfig()
    assert distilled_experiment(replace(new, optimizer=without_groups), 2).optimizer == without_groups


@dataclass(frozen=True)
class LongConfig(MixerConfig):
    filter: FilterConfig = field(default=ImplicitFilterConfig(emb_dim=3, width=4))


class Hidden(nn.Module):
    """A user's mixer whose filter cannot be reached: its attribute has another name."""

    d_model: int
    max_len: int
    config: LongConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    def setup(self):
        self.long_filter = build_filter(1, self.d_model, self.max_len, self.config.filter)

    def __call__(self, x, segment_ids=None, deterministic=True):
        return x + self.long_filter(x.shape[1])[0].T


def test_a_filter_that_cannot_be_reached_is_refused(own_parts):
    register("long", LongConfig, Hidden)
    config = model_config(LongConfig())
    with pytest.raises(UserError, match="mixer must be a module whose .* `filter`, .*, got 'Hidden'"):
        long_filters(config, jax.eval_shape(lambda: init_params(models.build(config), 0)))


@dataclass(frozen=True)
class OwnModelConfig(ModelConfig):
    max_len: int = L


def test_errors_are_relative_and_bounded():
    taps = noise(2 * 3, 32).reshape(2, 3, 32) * np.float32([1, 3, 0.1])[:, None]  # relative: none is alike
    before = LongFilters(3, taps)
    modes = modal_fit.fit(before.later, 4)
    later = modal_fit.response(modes, 31).reshape(2, 3, 31)
    after = LongFilters(3, np.concatenate([before.taps[..., :1], later], axis=-1))
    errors = filter_errors(before, after, spectra(before, 16, 0), 8)
    assert [(error.layer, error.filter) for error in errors] == [(3, 0), (3, 1)]
    for error, old, new in zip(errors, before.taps, after.taps, strict=True):
        expected = np.linalg.norm(new - old) / np.linalg.norm(old[:, 1:])
        assert error.error == pytest.approx(expected)
        by_channel = np.linalg.norm(new - old, axis=1) / np.linalg.norm(old[:, 1:], axis=1)
        assert (error.worst_channel, error.worst_error) == (
            by_channel.argmax(),
            pytest.approx(by_channel.max()),
        )
        assert error.least <= error.error <= error.balanced


def test_the_divergence_is_of_the_run_from_its_distilled_form_and_its_bound_on_a_difference():
    model = models.build(model_config(AttentionConfig(1), ffn="none", d_ff=None))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    run, distilled = (
        jax.tree.map(lambda leaf: np.float32(rng.standard_normal(leaf.shape)), shapes) for _ in range(2)
    )
    tokens = np.arange(L)[None] % 5
    batch = {"inputs": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}
    forward = jax.jit(lambda params: jax.nn.log_softmax(model.apply({"params": params}, tokens)))
    p, q = np.asarray(forward(run)), np.asarray(forward(distilled))
    found = make_comparison_step(model, model)((run, distilled), batch)["kl"]
    assert_close(found, (np.exp(p) * (p - q)).sum((-1, -2)))
    found, tried = SimpleNamespace(before={"loss": 2.0}), SimpleNamespace(values={"loss": 2.5})
    assert outcome.Outcome.increase(found, tried) == 0.5


def test_kl_against_its_definition():
    p, q = np.random.default_rng(0).dirichlet(np.ones(7), (2, 50))
    near = p * (1 + 1e-4 * noise(50, 7))
    near /= near.sum(1, keepdims=True)
    for other, tolerance in ((q, 1e-5), (near, 2e-2)):
        expected = (p * np.log(p / other)).sum(-1)
        found = jax.jit(kl_divergence)(np.float32(np.log(p)), np.float32(np.log(other)))
        assert (found >= 0).all()
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * expected.mean())
    assert jax.jit(kl_divergence)(np.float32([0, -200]), np.float32([-200, 0])) == 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model_config(HawkConfig()), "got 'hawk'"),
        (replace(model_config(HawkConfig(), HyenaConfig()), n_layers=1), "got 'hawk'"),
        # Few taps decode in constant time as they are.
        (model_config(HyenaConfig(filter=ShortFilterConfig(3))), "got 'hyena'"),
        (OwnModelConfig(), "workdir must be a run of a language_model, got 'OwnModelConfig'"),
        (model_config(HyenaConfig(n_blocks=2)), "n_blocks must be 1 to be distilled, got 2"),
        (replace(model_config(FIRConfig()), max_len=3), "max_len must be at least 4, got 3"),
    ],
)
def test_what_cannot_be_distilled(config, message):
    with pytest.raises(UserError, match=message):
        check_distillable(config)


@pytest.mark.parametrize("n_values", [1, 32])
def test_the_table_names_the_singular_values_that_were_computed(n_values):
    """Of long filters only the first are, and the shortest filters have one."""
    spectra = SimpleNamespace(alone=SimpleNamespace(values=np.ones((2, n_values))))
    found = SimpleNamespace(original=SimpleNamespace(filters=[SimpleNamespace(layer=0)]), spectra=[spectra])
    table = outcome._singular_values(found)
    names = [column.header for column in table.columns][1:]
    assert names == (["1."] if n_values == 1 else ["3.", "5.", "9.", "17."])
