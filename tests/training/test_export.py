import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyena_jax import config, models
from hyena_jax.config import UserError
from hyena_jax.training import export
from hyena_jax.training.loop import train
from hyena_jax.training.run_folder import load_params, read_run
from hyena_jax.training.step import init_params

PARAMS = {
    "blocks_0": {"mixer": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T}},
    "norm": {"scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    export.write(path, PARAMS, {"seed": 1}, step=7)
    return path


def test_what_is_written_is_read_back_with_its_config(file):
    from safetensors import safe_open

    lines = []
    read = export.read(file, jax.eval_shape(lambda: PARAMS), lines.append)
    chex.assert_trees_all_equal(read, PARAMS)
    assert lines == []
    assert set(load_file(file)) == {"blocks_0/mixer/kernel", "norm/scale", "norm/bias"}
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["config"]) == json.loads(file.with_suffix(".json").read_text()) == {"seed": 1}
    assert metadata["step"] == "7"


def test_every_name_that_does_not_fit_gets_a_line(file):
    tensors = load_file(file)
    tensors["norm/scales"] = tensors.pop("norm/scale")
    tensors["norm/bias"] = np.zeros(4, np.float32)
    save_file(tensors, file)
    lines = []
    with pytest.raises(UserError, match="does not fit the model: 3 parameters, listed above"):
        export.read(file, PARAMS, lines.append)
    assert [line.removeprefix(f"{file}: ") for line in lines] == [
        "norm/bias must be (3,), got (4,)",
        "norm/scale (3,) is missing; the file has norm/scales",
        "norm/scales (3,) is unexpected: the model has no such parameter",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "a new file, but model.safetensors is there, got"),
        ("model.npz", "a new file, but model.json is there"),
        ("other.json", "a file such as model.safetensors"),
        ("other", "a file such as model.safetensors"),
        ("nowhere/other.safetensors", "in a folder that exists"),
    ],
)
def test_nothing_is_overwritten(file, name, message):
    with pytest.raises(UserError, match=message):
        export.check_target(file.parent / name)
    export.check_target(file.with_name("other.safetensors"))


def test_a_full_disk_leaves_no_draft(file, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    before = file.read_bytes()
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="could not be written: No space left"):
        export.write(file, PARAMS, {"seed": 2}, step=8)
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} == {"model.safetensors", "model.json"}


@pytest.mark.parametrize("content", [None, b"", b"not a file of tensors"])
def test_what_is_no_such_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"init_from '.*' cannot be read"):
        export.read(path, PARAMS, print)


def test_a_run_starts_from_the_parameters_of_another(experiment, tmp_path, console):
    """With a learning rate too small to move them, it ends with them too; a wrong file changes nothing."""
    optimizer = dataclasses.replace(experiment.optimizer, learning_rate=1e-30)
    groups = tuple(dataclasses.replace(g, learning_rate=None, weight_decay=0.0) for g in optimizer.groups)
    still = dataclasses.replace(
        experiment,
        training=dataclasses.replace(experiment.training, steps=1),
        optimizer=dataclasses.replace(optimizer, weight_decay=0.0, groups=groups),
    )
    model = models.build(dataclasses.replace(still.model, vocab_size=256))
    given, file = init_params(model, 5), tmp_path / "model.safetensors"
    export.write(file, given, config.encode(still), step=0)
    train(still, tmp_path / "run", console, init_from=file)
    run = read_run(tmp_path / "run")
    chex.assert_trees_all_equal(load_params(run, model, "latest", print)[1], given)

    wider = dataclasses.replace(still, model=dataclasses.replace(still.model, d_ff=9))
    with pytest.raises(UserError, match="does not fit the model: 3 parameters"):
        train(wider, tmp_path / "other", console, init_from=file)
    assert "blocks_0/mlp/in_proj/kernel must be (8, 9), got (8, 8)" in console.file.getvalue()
    assert not (tmp_path / "other").exists()
