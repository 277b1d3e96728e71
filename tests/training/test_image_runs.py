"""Runs on images through the loop that trains on text."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from idx_files import random_images, write_pair
from rich.console import Console
from whole_runs import evaluated, rows, saved, with_training

from hyena_jax.config import AdamWConfig, CosineConfig, ImageClassifierConfig, ImagesConfig, ParallelConfig
from hyena_jax.data.images import load_image_set
from hyena_jax.system.errors import UserError
from hyena_jax.training.folder import read_folder
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.run import train

# Its tests share a run.
pytestmark = [pytest.mark.xdist_group("image_runs"), pytest.mark.wide]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("images") / "pair", 50)


@pytest.fixture(scope="module")
def experiment(settings, folder):
    """The usual run, on images."""
    model = ImageClassifierConfig(
        pattern=settings.model.pattern, n_layers=1, d_model=8, d_ff=8, patch_size=(2, 2), dropout=0.1
    )
    return dataclasses.replace(
        with_training(settings, eval_batch_size=3),
        model=model,
        data=ImagesConfig(path=str(folder), batch_size=4),
        optimizer=AdamWConfig(learning_rate=2e-2, schedule=CosineConfig(warmup_steps=2)),
    )


@pytest.fixture(scope="module")
def trained(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("images") / "whole"
    train(experiment, workdir, Console(file=io.StringIO()))
    return workdir


def test_rows_and_settings_are_of_images(whole, experiment):
    found = read_rows(whole / "metrics.jsonl")
    assert [row["step"] for row in found if "train/loss" in row] == [3, 6, 9, 12]
    assert {*found[0]} == {
        "step", "time", "train/loss", "train/grad_norm", "train/param_norm", "train/learning_rate",
        "train/images_per_second", "train/data_wait",
        "goodput/device_images_per_second", "goodput/data_wait",
        "goodput/evaluating", "goodput/saving",
    }  # fmt: skip
    judged = [row for row in found if "validation/loss" in row]
    assert [{*row} for row in judged] == 3 * [{"step", "time", "validation/loss", "validation/accuracy"}]
    assert judged[-1]["validation/loss"] < judged[0]["validation/loss"] < 1.5
    run = read_folder(whole)
    assert run.encoding == load_image_set(experiment.data).normalization
    model = run.experiment.model
    assert (model.image_size, model.channels, model.n_classes) == ((6, 5), 1, 3)
    assert dataclasses.replace(model, image_size=None, channels=None, n_classes=None) == experiment.model


def log_probabilities(workdir, images):
    """Float64 log-probabilities of the images in the file, from a run's saved parameters."""
    normalization, (_, model, params) = read_folder(workdir).encoding, saved(workdir)
    inputs = ((images / 255 - normalization.mean) / normalization.std).astype(np.float32)[..., None]
    logits = np.float64(jax.jit(model.apply)({"params": params}, inputs))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_evaluation_is_exact(whole):
    images, labels = (part[45:] for part in random_images(50))
    logp = log_probabilities(whole, images)
    values = evaluated(whole, batch_size=2)
    assert values["loss"] == pytest.approx(-logp[np.arange(5), labels].mean(), rel=1e-5)
    assert values["accuracy"] == np.mean(logp.argmax(-1) == labels)
    assert values["images"] == 5
    last = [row for row in rows(whole) if "validation/loss" in row][-1]
    for name in ("loss", "accuracy"):
        assert values[name] == pytest.approx(last[f"validation/{name}"], rel=1e-6)


def test_other_images_are_read_with_the_normalization_of_the_run_and_must_fit_its_model(whole, tmp_path):
    images, labels = random_images(11, seed=8)
    values = evaluated(whole, str(write_pair(tmp_path / "other", 11, seed=8)))
    logp = log_probabilities(whole, images)
    assert values["loss"] == pytest.approx(-logp[np.arange(11), labels].mean(), rel=1e-5)
    assert values["images"] == 11
    with pytest.raises(UserError, match=r"model.image_size must be the data's \(7, 5\), got \(6, 5\)"):
        evaluated(whole, str(write_pair(tmp_path / "large", 12, height=7)))


def test_changed_images_are_refused(whole, experiment, tmp_path, console):
    others = ImagesConfig(path=str(write_pair(tmp_path / "others", 50, seed=1)), batch_size=4)
    with pytest.raises(UserError, match="the images changed since workdir"):
        train(dataclasses.replace(experiment, data=others), whole, console)
    config = json.loads((whole / "config.json").read_text())
    del config["sha256"]  # delete the digest, as a user who edits the settings does
    config["data"]["path"] = others.path
    (whole / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the images changed since the run was started"):
        evaluated(whole)


def test_images_are_not_cut_into_parts(experiment, tmp_path, console):
    layout = ParallelConfig(strategy="sharded", devices=2, sequence=2)
    with pytest.raises(UserError, match="parallel.sequence must be 1 unless the model reads tokens, got 2"):
        train(dataclasses.replace(experiment, parallel=layout), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()
