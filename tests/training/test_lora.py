"""LoRA: only the factors are trained and saved, and everything else stays bit-identical."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file
from whole_runs import contents, with_training

import hyena_jax
from hyena_jax import cli, models, parallel
from hyena_jax.config import (
    AttentionConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    LoRAConfig,
    ParallelConfig,
    SGDConfig,
)
from hyena_jax.data.examples import examples_of
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves
from hyena_jax.training import initial, lora
from hyena_jax.training.folder import BASE, DESCRIPTION, read_folder
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_gradients, make_train_step

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`

LORA = LoRAConfig(rank=2, alpha=3.0)
SMALL = LanguageModelConfig((AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=16, vocab_size=16)
MODEL = dataclasses.replace(SMALL, lora=LORA)
NAMES = ("mixer/qkv_proj", "mixer/out_proj", "mlp/in_proj", "mlp/out_proj")
TARGETS = [f"blocks_0/{name}/kernel" for name in NAMES]


@pytest.fixture(scope="module")
def base():
    return jax.tree.map(np.asarray, init_params(models.build(MODEL), 0))


@pytest.fixture(scope="module")
def factors(base):
    """Factors after some training: B is not zero."""
    draw = np.random.default_rng(1).standard_normal
    found = lora.init_factors(LORA, base, 0)
    return jax.tree.map(lambda leaf: np.float32(leaf + draw(leaf.shape)), found)


def batch(n_rows=4):
    windows = np.random.default_rng(0).integers(0, 16, (n_rows, 14), dtype=np.int32)
    weights = np.ones((n_rows, 13), np.float32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


def test_the_default_targets_are_the_dense_projections():
    """Of RecurrentGemma's layers and of Hyena's: not the gates, filters, convolutions, norms or embedding."""
    model = dataclasses.replace(MODEL, pattern=(HawkConfig(), HyenaConfig()), n_layers=2, ffn="geglu")
    shapes = jax.eval_shape(lambda: init_params(models.build(model), 0))
    names = ("mixer/in_proj", "mixer/out_proj", "mlp/gate_proj", "mlp/in_proj", "mlp/out_proj")
    wanted = {f"blocks_{i}/{name}/kernel" for i in (0, 1) for name in names}
    assert {*lora.target_shapes(LORA, shapes)} == wanted
    gates = dataclasses.replace(LORA, targets="gate")  # their kernels are blocks, not matrices
    assert {*lora.target_shapes(gates, shapes)} == {name for name in wanted if "gate_proj" in name}


def test_factors_start_with_a_product_of_zero(base):
    found = named_leaves(lora.init_factors(LORA, base, 0))
    ends = ("lora_a", "lora_b")
    assert {*found} == {f"{name.removesuffix('kernel')}{end}" for name in TARGETS for end in ends}
    a, b = (found[f"blocks_0/mixer/qkv_proj/{end}"] for end in ends)
    assert (a.shape, b.shape) == ((8, 2), (2, 24))
    assert 0.2 < np.abs(a).max() <= 8**-0.5
    assert not b.any()
    other = named_leaves(lora.init_factors(LORA, base, 1))
    assert not np.array_equal(other["blocks_0/mixer/qkv_proj/lora_a"], a)


def test_merged_kernels_are_sums_with_the_scaled_product(base, factors):
    assert [LORA.scale, dataclasses.replace(LORA, rank=1).scale] == [1.5, 3.0]
    assert dataclasses.replace(LORA, rank_stabilised=True).scale == pytest.approx(3 / 2**0.5)
    found = named_leaves(lora.merged(LORA, lora.Adapted(base, factors)))
    parts = named_leaves(factors)
    for name, leaf in named_leaves(base).items():
        if name in TARGETS:
            stem = name.removesuffix("kernel")
            leaf = leaf + 1.5 * parts[f"{stem}lora_a"] @ parts[f"{stem}lora_b"]
            np.testing.assert_allclose(found[name], leaf, rtol=0, atol=1e-5)
        else:
            assert found[name] is leaf


def test_the_loss_is_the_merged_one_and_gradients_of_factors_follow_the_chain_rule(base, factors):
    """dA = s dW B^T and dB = s A^T dW, with dW of the merged model."""
    one = {name: value for name, value in batch().items() if name != "weights"}
    adapted, bare = (
        make_gradients(models.build(dataclasses.replace(MODEL, lora=lora))) for lora in (LORA, LoRAConfig())
    )

    @jax.jit
    def both(key):
        whole = lora.merged(LORA, lora.Adapted(base, factors))
        return adapted(factors, base, one, key), bare(whole, None, one, key)

    (found, values), (full, wanted) = both(jax.random.key(0))
    assert values["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    found, full, parts = map(named_leaves, (found, full, factors))
    assert {*found} == {*parts}
    for name in TARGETS:
        stem = name.removesuffix("kernel")
        a, b = parts[f"{stem}lora_a"], parts[f"{stem}lora_b"]
        for end, wanted in (
            ("lora_a", LORA.scale * full[name] @ b.T),
            ("lora_b", LORA.scale * a.T @ full[name]),
        ):
            np.testing.assert_allclose(found[stem + end], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.grid
def test_strategies_agree(base):
    """Two devices with copies, and two that shard base and factors: the same losses."""
    losses = {}
    for name, options in (("pmap", {}), ("sharded", {"strategy": "sharded", "fsdp": 2})):
        strategy = parallel.make_strategy(ParallelConfig(devices=2, **options))
        model = models.build(MODEL, strategy.sequence_axis, strategy.layout)
        optimizer = make_optimizer(SGDConfig(learning_rate=1.0), lora.init_factors(LORA, base, 0), 10)
        state = strategy.make_state(lambda o=optimizer: init_state(lora.init_factors(LORA, base, 0), o))
        state = state._replace(base=strategy.place(base))
        step = make_train_step(model, optimizer, 0, strategy.axis_name)
        step = strategy.map_train_step(step, jax.eval_shape(lambda s=state: s))
        losses[name] = []
        for _ in range(3):
            state, values = step(state, strategy.place_batch(batch()))
            losses[name].append(float(values["loss"]))
        chex.assert_trees_all_equal(strategy.host_copy(state.base), base)
    np.testing.assert_allclose(losses["sharded"], losses["pmap"], rtol=1e-5)
    assert losses["pmap"][2] < losses["pmap"][0]


@pytest.fixture(scope="module")
def run(trained, text_file, tmp_path_factory):
    """Four steps of LoRA on the run `trained`: to be copied, not changed."""
    experiment = read_folder(trained).experiment
    experiment = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, lora=LORA),
        training=dataclasses.replace(experiment.training, steps=4, checkpoint_every=2),
        optimizer=dataclasses.replace(experiment.optimizer, learning_rate=0.05),
    )
    folder = tmp_path_factory.mktemp("lora") / "run"
    return hyena_jax.train(experiment, folder, init_from=trained, quiet=True)


@pytest.mark.grid
def test_only_the_factors_are_saved_and_all_else_stays(run, trained):
    source = hyena_jax.load_run(trained)
    base, found = named_leaves(source.params), named_leaves(run.params)
    chex.assert_trees_all_equal(load_file(run.workdir / BASE), base)
    changed = {name for name in base if not np.array_equal(found[name], base[name])}
    assert changed == {*lora.target_shapes(LORA, source.params)}
    saved = [path for path in (run.workdir / "checkpoints" / "4").rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in saved)
    assert b"lora_a" in text
    assert b"final_norm" not in text
    values = [row["validation/loss"] for row in run.metrics() if "validation/loss" in row]
    assert run.evaluate()["loss"] == pytest.approx(values[-1], abs=1e-5)  # merged, and not merged
    assert values[-1] != pytest.approx(source.evaluate()["loss"], abs=1e-3)


@pytest.mark.grid
def test_a_run_is_continued_bit_by_bit(run, tmp_path):
    folder = shutil.copytree(run.workdir, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "4")
    again = hyena_jax.train(None, folder, quiet=True)
    chex.assert_trees_all_equal(again.params, run.params)
    names = ("step", "train/loss", "train/grad_norm", "validation/loss")
    one, other = ([{k: row.get(k) for k in names} for row in r.metrics()] for r in (run, again))
    assert one == other


@pytest.mark.wide
def test_an_export_is_merged_and_another_run_starts_from_the_folder(run, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    assert cli.main(["export", str(run.workdir), "--output", str(file)]) == 0
    chex.assert_trees_all_equal(load_file(file), named_leaves(run.params))
    assert json.loads(file.with_suffix(".json").read_text())["model"]["lora"]["rank"] is None
    shapes = jax.eval_shape(lambda: run.params)
    chex.assert_trees_all_equal(initial.read_params(run.workdir, shapes, print), run.params)
    capsys.readouterr()


RANK = "--model.lora.rank 2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.lora.rank 0", "--model.lora.rank must be at least 1, got 0"),
        ("--model.lora.rank 9", "--model.lora.rank must be at most the smaller side of blocks_0/"),
        (f"{RANK} --model.lora.targets q_proj$", "--model.lora.targets must be a match of a dense kernel;"),
        (f"{RANK} --model.lora.targets (in_proj", "--model.lora.targets must be a regular expression, got"),
        ("--model.lora.alpha 8", "--model.lora.alpha must be 16.0 without lora.rank, got 8.0"),
        (f"{RANK} --init-from nothing", "--init-from 'nothing' cannot be read"),
        (RANK, "--init-from must be a run's folder or a file from `export`"),
        (f"{RANK} --init-from .", "--init-from '.' cannot be read: workdir '.' holds no run"),
        (f"{RANK} --model.d-ff 9", "does not fit the model: 3 parameters, first "),
        (f"{RANK} --data.tokenizer characters", "--data.tokenizer must be 'bytes', as in "),
    ],
)
def test_a_start_that_cannot_be_is_refused(trained, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    start = [] if flags == RANK or "--init-from" in flags else ["--init-from", str(trained)]
    command = ["train", str(trained / "config.json"), "--workdir", "new", *start, *flags.split()]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_the_folder_of_another_experiment_is_refused(run, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(UserError, match="a different experiment: .*model.lora.rank: None -> 2"):
        hyena_jax.train(run.experiment, folder, init_from=trained, quiet=True)


def write_another(run):
    """Other values, whose own digest is right."""
    params = unflatten_dict({name: leaf + 1 for name, leaf in load_file(run / BASE).items()}, sep="/")
    (run / BASE).unlink()
    (run / DESCRIPTION).unlink()
    initial.write_base(run, params, initial.digest(params), "elsewhere")


def damage(run):
    data = bytearray((run / BASE).read_bytes())
    data[-1] ^= 1
    (run / BASE).write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda run: (run / BASE).unlink(), r"base '.*base.safetensors' cannot be read"),
        (lambda run: (run / DESCRIPTION).unlink(), r"base '.*base.json' cannot be read"),
        (damage, r"base '.*' is not what was saved: its SHA-256 differs from base.json"),
        (write_another, r"SHA-256 of base.safetensors must be the .* that .*4 was trained on, got"),
    ],
)
def test_a_wrong_base_is_refused(run, tmp_path, harm, message):
    folder = shutil.copytree(run.workdir, tmp_path / "run")
    harm(folder)
    before = contents(folder)
    with pytest.raises(UserError, match=message):
        hyena_jax.load_run(folder)
    with pytest.raises(UserError, match=message):
        hyena_jax.train(with_training(run.experiment, steps=6), folder, quiet=True)
    assert contents(folder) == before


def test_a_plan_and_a_benchmark_refuse_what_they_would_not_measure(run):
    with pytest.raises(UserError, match="model.lora.rank must be None: the step that trains all parameters"):
        examples_of(run.experiment, (), 256)
