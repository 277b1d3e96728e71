"""A run whose optimizer is changed where its user says so: values, refusals, and what the folder keeps."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hyena_jax
from hyena_jax import cli, config, models
from hyena_jax.config import (
    AdafactorConfig,
    AdamWConfig,
    ConstantConfig,
    LoRAConfig,
    MuonConfig,
    ParameterGroup,
    SGDConfig,
)
from hyena_jax.data import dataset
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import restore_readonly, saved_steps
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.optimizer import have_equal_states, make_optimizer
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import train
from hyena_jax.training.step import init_params, init_state

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`


ACCEPTED = StartOptions(accept_changed_optimizer=True)


def with_optimizer(experiment, steps, **values):
    training = replace(experiment.training, steps=steps, log_every=1)
    return replace(experiment, training=training, optimizer=replace(experiment.optimizer, **values))


@pytest.mark.grid
def test_the_values_are_those_of_a_continuation_by_hand(experiment, tmp_path, console):
    """The state of the checkpoint, updated by optax with gradients of the cross-entropy, written out."""
    run = tmp_path / "run"
    dry = replace(experiment, model=replace(experiment.model, dropout=0.0))
    values = {"learning_rate": 3e-4, "clip_norm": 0.1, "weight_decay": 0.5, "b1": 0.5}
    changed = with_optimizer(dry, 8, schedule=ConstantConfig(7), **values)
    train(with_optimizer(dry, 5), run, console)
    model = models.build(config.read_run(run).model)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    optimizer = make_optimizer(changed.optimizer, shapes, 8)
    state = jax.eval_shape(lambda: init_state(shapes, optimizer)).to_items()
    target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state)
    items = restore_readonly(run / "checkpoints", target, print).items
    result = train(changed, run, console, ACCEPTED)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    update = jax.jit(optimizer.update)
    gradient = jax.jit(jax.grad(loss))
    params, opt_state = items["params"], items["train_state"]["opt_state"]
    batches = dataset.load(changed.data).train_batches(4, changed.seed)
    for step in (5, 6, 7):
        gradients = gradient(params, jax.tree.map(jnp.asarray, batches[step]))
        updates, opt_state = update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result.params, params)
    rates = [row["train/learning_rate"] for row in read_rows(run / "metrics.jsonl") if "train/loss" in row]
    np.testing.assert_allclose(rates[5:], [3e-4 * 5 / 7, 3e-4 * 6 / 7, 3e-4], rtol=1e-6)


def test_another_optimizer_counts_from_the_next_step_on(experiment):
    first = config.stages_after((), experiment, 0)
    changed = with_optimizer(experiment, 14, learning_rate=1e-3)
    stages = config.stages_after(config.stages_after(first, changed, 12), changed, 13)
    assert [stage.first_step for stage in stages] == [1, 13]
    assert config.stage_changes(stages) == {13: ["optimizer.learning_rate: 0.002 -> 0.001"]}
    # From the checkpoint before it, without any of its steps.
    assert config.stages_after(stages, experiment, 12) == first


def test_a_run_keeps_from_which_step_on_another_optimizer_trains_it(whole, experiment, console):
    changed = with_optimizer(experiment, 13, learning_rate=1e-3)
    with pytest.raises(UserError, match="optimizer.learning_rate: 0.002 -> 0.001"):
        train(changed, whole, console)
    train(changed, whole, console, ACCEPTED)
    assert [stage.first_step for stage in config.read_stages(whole, changed)] == [1, 13]


@pytest.mark.grid
def test_without_the_flag_it_is_refused_and_the_folder_says_what_held_when(whole, experiment, capsys):
    longer = ["train", "--resume", str(whole), "--logging.sample-tokens", "0", "--training.steps"]
    lower, accept = ["--optimizer.learning-rate", "1e-3"], "--accept-changed-optimizer"
    before = (whole / "config.json").read_bytes()
    assert cli.main([*longer, "13", *lower]) == 2
    error = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.002 -> 0.001 (--accept-changed-optimizer continues it with" in error
    assert error.count("\n") == 1
    assert (whole / "config.json").read_bytes() == before
    assert cli.main([*longer, "13", *lower, accept]) == 0
    assert "changed since the last start: optimizer.learning_rate: 0.002 -> 0.001" in capsys.readouterr().out
    assert cli.main([*longer, "14"]) == 0  # no flag is needed from now on
    assert cli.main([*longer, "15", "--optimizer.learning-rate", "2e-3"]) == 2
    assert "optimizer.learning_rate: 0.001 -> 0.002" in capsys.readouterr().err
    others = ["--optimizer.schedule", "constant", "--optimizer.weight-decay", "0"]
    assert cli.main([*longer, "15", accept, *others]) == 0
    now = config.read_run(whole)
    assert (now.optimizer.learning_rate, now.optimizer.weight_decay) == (1e-3, 0.0)
    assert config.stage_changes(config.read_stages(whole, now)) == {
        13: ["optimizer.learning_rate: 0.002 -> 0.001"],
        15: ["optimizer.schedule.type: 'cosine' -> 'constant'", "optimizer.weight_decay: 0.1 -> 0.0"],
    }
    # A start that was killed before it wrote config.json has changed nothing.
    assert config.read_stages(whole, experiment)[-1].first_step == 1
    (whole / "optimizers.json").write_text((whole / "optimizers.json").read_text().replace("0.002", "0.003"))
    assert cli.main([*longer, "16"]) == 2
    assert "optimizers.json cannot be read: it was damaged or edited" in capsys.readouterr().err


@pytest.mark.grid
def test_show_and_compare_say_that_it_was_changed(trained, experiment, tmp_path, console, capsys):
    for name in ("same", "changed"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    changed = with_optimizer(experiment, 14, learning_rate=1e-3)
    train(changed, tmp_path / "runs" / "changed", console, ACCEPTED)
    also = with_optimizer(experiment, 12, learning_rate=1e-3)
    train(also, tmp_path / "runs" / "also", console)
    rows = hyena_jax.compare(tmp_path / "runs")
    assert sorted(row.label for row in rows) == ["also", "changed (optimizer changed at step 13)", "same"]
    rows = hyena_jax.compare(tmp_path / "runs", by="optimizer.learning_rate")
    values = {"0.001", "0.002", "0.002; 0.001 from step 13"}
    assert {row.label for row in rows} == {f"optimizer.learning_rate={value}" for value in values}
    page = tmp_path / "page.html"
    assert cli.main(["show", str(tmp_path / "runs" / "changed"), "--output", str(page)]) == 0
    text = page.read_text()
    assert "from step 13 on" in text
    assert "optimizer.learning_rate: 0.002 -&gt; 0.001" in text


@pytest.mark.wide
def test_a_change_of_what_the_state_holds_is_refused(whole, experiment, console):
    held = (whole / "config.json").read_bytes()
    groups = (ParameterGroup("kernel"), *experiment.optimizer.groups)
    for other in (SGDConfig(), replace(experiment.optimizer, groups=groups)):
        wrong = replace(experiment, optimizer=other)
        message = "--accept-changed-optimizer does not continue it, since the optimizer's state would differ"
        with pytest.raises(UserError, match=message):
            train(wrong, whole, console, ACCEPTED)
        with pytest.raises(UserError, match="holds a different experiment") as refused:
            train(wrong, whole, console)
        assert "--accept" not in str(refused.value)
    other = with_optimizer(replace(experiment, seed=3), 13, learning_rate=1e-4)
    with pytest.raises(UserError, match="optimizer.learning_rate.*; seed: 0 -> 3 "):
        train(other, whole, console, ACCEPTED)
    assert (whole / "config.json").read_bytes() == held
    assert saved_steps(whole / "checkpoints")[0] == 12


@pytest.mark.parametrize(
    ("before", "after", "equal"),
    [
        (SGDConfig(), SGDConfig(momentum=0.5, nesterov=True, clip_norm=None), True),
        (SGDConfig(), SGDConfig(momentum=0.0), False),
        (AdamWConfig(), AdamWConfig(b2=0.5, eps=1e-6, schedule=ConstantConfig()), True),
        (AdamWConfig(groups=(ParameterGroup("a"),)), AdamWConfig(groups=(ParameterGroup("a", 0.0),)), True),
        (AdafactorConfig(), AdafactorConfig(decay_rate=0.7, multiply_by_parameter_scale=False), True),
        (AdafactorConfig(), AdafactorConfig(min_dim_size_to_factor=2), False),
        (MuonConfig(matrices="kernel"), MuonConfig(matrices="kernel", ns_steps=3, consistent_rms=None), True),
        (MuonConfig(matrices="a/kernel"), MuonConfig(matrices="kernel"), False),
    ],
)
def test_which_states_are_alike(before, after, equal):
    params = {"a": {"kernel": jnp.zeros((4, 3))}, "b": {"kernel": jnp.zeros((3, 4))}}
    assert have_equal_states(*(make_optimizer(one, params, 9) for one in (before, after)), params) is equal


@pytest.mark.grid
def test_factors_of_lora_continue_on_their_base(trained, experiment, tmp_path, console):
    adapted = replace(experiment, model=replace(experiment.model, lora=LoRAConfig(rank=2)))
    run = tmp_path / "run"
    train(with_optimizer(adapted, 2), run, console, StartOptions(init_from=trained))
    train(with_optimizer(adapted, 3, learning_rate=1e-4), run, console, ACCEPTED)
    assert saved_steps(run / "checkpoints")[0] == 3
