"""LoRA: only the factors are trained and saved, and everything else stays bit-identical."""

import dataclasses
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from whole_runs import contents, with_training

import hyena_jax
from hyena_jax import cli, config, models, parallel
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
from hyena_jax.training.step import init_params, init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`

LORA = LoRAConfig(rank=2, alpha=3.0)
SMALL = LanguageModelConfig((AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=16, vocab_size=16)
MODEL = dataclasses.replace(SMALL, ffn="geglu", lora=LORA)
MLP = ("mlp/gate_proj", "mlp/in_proj", "mlp/out_proj")
TARGETS = [f"blocks_0/{name}/kernel" for name in ("mixer/qkv_proj", "mixer/out_proj", *MLP)]


@pytest.fixture(scope="module")
def base():
    return jax.tree.map(np.asarray, init_params(models.build(MODEL), 0))


@pytest.fixture(scope="module")
def factors(base):
    """Factors after some training: B is not zero."""
    found = lora.init_factors(LORA, base, 0)
    return jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(1), leaf.shape), found)


def batch(n_rows=4):
    windows = np.random.default_rng(0).integers(0, 16, (n_rows, 14), dtype=np.int32)
    weights = np.ones((n_rows, 13), np.float32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


def test_the_default_targets_are_the_dense_projections():
    """Of RecurrentGemma's layers and of Hyena's: not the gates, filters, convolutions, norms or embedding."""
    model = dataclasses.replace(MODEL, pattern=(HawkConfig(), HyenaConfig()), n_layers=2)
    shapes = jax.eval_shape(lambda: init_params(models.build(model), 0))
    names = ("mixer/in_proj", "mixer/out_proj", *MLP)
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


@pytest.mark.parametrize(
    ("options", "scale"), [({}, 1.5), ({"rank_stabilised": True}, 3 / 2**0.5), ({"rank": 1}, 3.0)]
)
def test_merged_kernels_are_the_sums_in_float64(base, options, scale):
    settings = dataclasses.replace(LORA, **options)
    factors = lora.init_factors(settings, base, 0)
    factors = jax.tree.map(lambda leaf: np.asarray(leaf + 1, np.float64), factors)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: leaf.astype(np.float64), base)
        found = named_leaves(lora.merged(settings, lora.Adapted(double, factors)))
    parts = named_leaves(factors)
    for name, leaf in named_leaves(double).items():
        if name in TARGETS:
            stem = name.removesuffix("kernel")
            leaf = leaf + scale * parts[f"{stem}lora_a"] @ parts[f"{stem}lora_b"]
            np.testing.assert_allclose(found[name], leaf, rtol=1e-13)
        else:
            assert found[name] is leaf


def test_a_step_trains_the_factors_alone_by_the_chain_rule(base, factors):
    """One step of gradient descent: dA = s dW B^T and dB = s A^T dW, with dW of the merged model."""
    model, bare = (models.build(dataclasses.replace(MODEL, lora=one)) for one in (LORA, LoRAConfig()))
    adapted = lora.Adapted(base, factors)
    whole = lora.on_host(MODEL, adapted)
    sgd = SGDConfig(momentum=0.0, weight_decay=0.0, clip_norm=None, learning_rate=1.0)
    sgd = dataclasses.replace(sgd, schedule=config.ConstantConfig(warmup_steps=0))
    one, rows = {name: value for name, value in batch().items() if name != "weights"}, {}
    for name, module, params, kept in (("lora", model, factors, base), ("full", bare, whole, None)):
        optimizer = make_optimizer(sgd, params, 10)
        state = init_state(jax.tree.map(jnp.asarray, params), optimizer)._replace(base=kept)
        rows[name], values = jax.jit(make_train_step(module, optimizer, 0))(state, one)
        rows[f"{name} loss"] = values["loss"]
    np.testing.assert_allclose(rows["lora loss"], rows["full loss"], rtol=1e-6)
    chex.assert_trees_all_equal(rows["lora"].base, base)
    before, after = named_leaves(factors), named_leaves(rows["lora"].params)
    for name in TARGETS:
        stem = name.removesuffix("kernel")
        a, b = before[f"{stem}lora_a"], before[f"{stem}lora_b"]
        update = named_leaves(rows["full"].params)[name] - named_leaves(whole)[name]
        for end, wanted in (("lora_a", LORA.scale * update @ b.T), ("lora_b", LORA.scale * a.T @ update)):
            found = after[stem + end] - before[stem + end]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_unmerged_scores_are_the_merged_ones(base, factors):
    step = jax.jit(make_eval_step(models.build(MODEL)))
    adapted = lora.Adapted(base, factors)
    whole = lora.on_host(MODEL, adapted)
    chex.assert_trees_all_close(step(adapted, batch()), step(whole, batch()), rtol=1e-5)


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


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("missing", r"base '.*base.safetensors' cannot be read"),
        ("without digest", r"base '.*base.json' cannot be read"),
        ("damaged", r"base '.*' is not what was saved: its SHA-256 differs from base.json"),
        ("another", r"SHA-256 of base.safetensors must be the .* that .*4 was trained on, got"),
    ],
)
def test_a_wrong_base_is_refused(run, tmp_path, harm, message):
    folder = shutil.copytree(run.workdir, tmp_path / "run")
    base = folder / BASE
    if harm == "missing":
        base.unlink()
    elif harm == "without digest":
        (folder / DESCRIPTION).unlink()
    elif harm == "damaged":
        data = bytearray(base.read_bytes())
        data[-1] ^= 1
        base.write_bytes(data)
    else:
        params = jax.tree.map(lambda leaf: leaf + 1, run.params)
        base.unlink()
        (folder / DESCRIPTION).unlink()
        initial.write_base(folder, params, initial.digest(params), "elsewhere")
    before = contents(folder)
    with pytest.raises(UserError, match=message):
        hyena_jax.load_run(folder)
    with pytest.raises(UserError, match=message):
        hyena_jax.train(with_training(run.experiment, steps=6), folder, quiet=True)
    assert contents(folder) == before


def test_a_plan_and_a_benchmark_refuse_what_they_would_not_measure(run):
    with pytest.raises(UserError, match="model.lora.rank must be None: the step that trains all parameters"):
        examples_of(run.experiment, (), 256)
