"""Runs on shards: continued where these were moved, and documents kept apart."""

import dataclasses
import io
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from whole_runs import evaluated, rows, saved, with_training

from hyena_jax import models
from hyena_jax.config import HawkConfig, HyenaConfig, ShardsConfig
from hyena_jax.data import prepare
from hyena_jax.data.dataset import load
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.system.errors import UserError
from hyena_jax.training.folder import read_folder
from hyena_jax.training.loss import cross_entropy, scored
from hyena_jax.training.run import train
from hyena_jax.training.step import init_params

# Its tests share a run.
pytestmark = [pytest.mark.xdist_group("shards"), pytest.mark.wide]

SENTENCES = [f"{i} bottles of beer on the wall, {i} bottles of beer. " * 3 for i in range(60)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, texts in (("a", SENTENCES[:40]), ("b", SENTENCES[40:])):
        (folder / f"{name}.txt").mkdir()
        for i, text in enumerate(texts):
            (folder / f"{name}.txt" / f"{i:03d}.txt").write_text(text)
        plan = prepare.make_plan([str(folder / f"{name}.txt")], BytesTokenizer(), 0, 0.2, part_size=1000)
        prepare.prepare(plan, str(folder / name), 1, lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def on_shards(settings, sources):
    data = ShardsConfig(
        sources=(f"a={sources / 'a'}", f"b={sources / 'b'}"),
        weights=(0.75, 0.25),
        documents=True,
        seq_len=16,
        batch_size=4,
    )
    hawk = HawkConfig(reset_at_start=True)  # it has a short filter, too
    model = dataclasses.replace(settings.model, pattern=(hawk,))
    return dataclasses.replace(settings, model=model, data=data)


@pytest.fixture(scope="module")
def trained(on_shards, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "on_shards"
    train(on_shards, run, Console(file=io.StringIO()))
    return run


@pytest.mark.grid
def test_a_run_continues_on_moved_shards(whole, on_shards, sources, tmp_path, console):
    moved = shutil.copytree(sources, tmp_path / "moved")
    data = dataclasses.replace(on_shards.data, sources=(f"a={moved / 'a'}", f"b={moved / 'b'}"))
    train(with_training(dataclasses.replace(on_shards, data=data), steps=13), whole, console)
    said = console.file.getvalue().replace("\n", " ")
    assert "changed since the last start: data.sources" in said
    assert "continuing after step 12" in said


def test_what_a_run_measures_is_what_eval_measures(trained):
    values, last, run = evaluated(trained), rows(trained)[-1], read_folder(trained)
    assert last["step"] == saved(trained)[0] == 12
    assert values["loss"] == pytest.approx(last["validation/loss"], rel=1e-6)
    assert values["bits_per_byte"] == pytest.approx(last["validation/bits_per_byte"], rel=1e-6)
    data = load(run.experiment.data, run.encoding)
    n_tokens = int(data.held_out.tokens.sum())
    bits = values["loss"] * n_tokens / data.held_out_bytes / np.log(2)
    assert values["bits_per_byte"] == pytest.approx(bits)


@pytest.mark.grid
def test_a_document_does_not_see_the_one_before(on_shards):
    data = load(on_shards.data)
    experiment = data.complete(on_shards)
    model = models.build(experiment.model)
    params = init_params(model, 0)
    batch = jax.tree.map(np.array, data.rows(0, np.arange(64)))
    segments = batch["segment_ids"]
    row = int(np.argmax((segments.max(1) > 0) & (segments[:, 4] == 0)))
    n_first = int((segments[row] == 0).sum())
    assert 0 < n_first < segments.shape[1]
    ours = {name: x[row : row + 1] for name, x in batch.items()}
    whole = scored(cross_entropy, model, params, ours)
    alone = {name: x[:, n_first:] for name, x in ours.items() if name != "segment_ids"}
    np.testing.assert_allclose(whole[:, n_first:], scored(cross_entropy, model, params, alone), rtol=2e-5)
    seen = {name: x for name, x in ours.items() if name != "segment_ids"}
    assert not np.allclose(whole[:, n_first:], scored(cross_entropy, model, params, seen)[:, n_first:])


def test_a_mixer_that_cannot_keep_documents_apart_is_refused(on_shards, tmp_path, console):
    """Before the folder is made: a long filter reaches over all documents."""
    model = dataclasses.replace(on_shards.model, pattern=(HyenaConfig(),))
    with pytest.raises(
        UserError, match=r"data.documents must be False with model.pattern hyena .*: segment_ids must be None"
    ):
        train(dataclasses.replace(on_shards, model=model), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()
