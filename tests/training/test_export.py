import dataclasses
import json
import re
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from whole_runs import saved, with_training

from hyena_jax import config, models
from hyena_jax.cli.export import _card
from hyena_jax.parallel import make_strategy
from hyena_jax.system import files
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.recall import RecallConfig
from hyena_jax.training import export
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import initial_state, train
from hyena_jax.training.step import init_params

PARAMS = {
    "blocks_0": {"mixer": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T}},
    "norm": {"scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)},
    "temperature": np.array(1.5, np.float32),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    export.write(path, PARAMS, {"seed": "ü"}, step=7)
    return path


def test_what_is_written_is_read_back_with_its_config(file):
    lines = []
    read = export.read(file, jax.eval_shape(lambda: PARAMS), lines.append)
    chex.assert_trees_all_equal(read, PARAMS)
    assert lines == []
    assert set(load_file(file)) == {"blocks_0/mixer/kernel", "norm/scale", "norm/bias", "temperature"}
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    for text in (metadata["config"], file.with_suffix(".json").read_text()):
        assert json.loads(text) == {"seed": "ü"}
    assert metadata["step"] == "7"


def test_the_same_run_gives_the_same_bytes(tmp_path):
    params = {"kernel": np.arange(6.0).reshape(2, 3)}
    for i in range(8):  # the library alone would order the metadata anew each time
        export.write(tmp_path / f"{i}.safetensors", params, {"a": "ü"}, 3)
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(8)}) == 1


def test_every_name_that_does_not_fit_gets_a_line(file):
    tensors = load_file(file)
    tensors["norm/scales"] = tensors.pop("norm/scale")
    tensors["norm/bias"] = np.zeros(4, np.float32)
    save_file(tensors, file)
    lines = []
    with pytest.raises(UserError, match="does not fit the model: 3 parameters, first "):
        export.read(file, PARAMS, lines.append)
    assert [line.removeprefix(f"{file}: ") for line in lines] == [
        "norm/bias must be (3,), got (4,)",
        "norm/scale (3,) is missing; the file has norm/scales",
        "norm/scales (3,) is unexpected: the model has no such parameter",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "a new file, but model.safetensors already exists, got"),
        ("alone.safetensors", "a new file, but alone.json already exists"),
        ("other.json", "a file such as model.safetensors"),
        ("model.md", "a file such as model.safetensors"),
        ("", "a file such as model.safetensors"),
        ("nowhere/other.safetensors", "in a folder that exists"),
    ],
)
def test_nothing_is_overwritten(file, name, message):
    (file.parent / "alone.json").touch()
    with pytest.raises(UserError, match=message):
        export.check_target(file.parent / name)
    export.check_target(file.with_name("other.safetensors"))


@pytest.mark.parametrize(
    ("model", "data", "smoothing", "unit"),
    [
        (config.LanguageModelConfig(), config.TextConfig(), 0.0, "nats a token"),
        (config.LanguageModelConfig(), config.TextConfig(), 0.1, ""),
        (config.ImageClassifierConfig(), config.ImagesConfig(), 0.0, "nats an image"),
        (config.LanguageModelConfig(), RecallConfig(), 0.0, "nats an answer"),
    ],
)
def test_the_card_says_what_the_loss_counts(tmp_path, model, data, smoothing, unit):
    loss = config.CrossEntropyConfig(label_smoothing=smoothing)
    experiment = config.Experiment(model=model, data=data, loss=loss)
    folder, rows = SimpleNamespace(fingerprint="0"), [{"step": 1, "validation/loss": 1.5}]
    run = SimpleNamespace(
        experiment=experiment, workdir=tmp_path, step=1, params={}, folder=folder, metrics=lambda: rows
    )
    assert f"| validation loss | {' '.join(['1.5', unit]).strip()} |" in _card(run, "unknown")
    rows[0]["validation/loss"] = None
    assert "| validation loss | not measured |" in _card(run, "unknown")


def test_a_full_disk_leaves_no_draft(file, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    before = file.read_bytes()
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="could not be written: No space left"):
        export.write(file, PARAMS, {"seed": 2}, step=8)
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} == {"model.safetensors", "model.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path, monkeypatch, name):
    write = files.write_safetensors

    def beside_another(*args):
        (tmp_path / name).write_text("another's")
        write(*args)

    monkeypatch.setattr(files, "write_safetensors", beside_another)
    with pytest.raises(UserError, match=f"{name}' was made by somebody else meanwhile"):
        export.write(tmp_path / "model.safetensors", PARAMS, {}, step=7)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "another's"}


HEADER = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def tensors(path, header, data=bytes(8), n_header=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if n_header is None else n_header).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"n_header": 2**63},
        {"n_header": 0},
        {"header": b"[" * 10**5},
        {"header": b"[]"},
        {"header": {"x": {**HEADER["x"], "shape": [10**9, 10**9]}}},
        {"header": {"x": {**HEADER["x"], "shape": [-2, -1]}}},
        {"header": {"x": {**HEADER["x"], "shape": 2}}},
        {"header": {"x": {**HEADER["x"], "data_offsets": [8, 16]}}},
        {"header": {"x": {**HEADER["x"], "data_offsets": [8, 0]}}},
        {"header": {"x": {**HEADER["x"], "data_offsets": [0, 10**400]}}},
        {"header": {"x\n\x1b[1m": 3}},
        {"data": b""},
    ],
)
def test_missing_files_and_headers_that_lie_are_refused(tmp_path, change):
    path = tmp_path / "model.safetensors"
    if change is not None:
        tensors(path, **{"header": HEADER, **change})
    with pytest.raises(UserError, match=r"init_from '.*' cannot be read: [^\n\x1b]+$"):
        export.read(path, {"x": np.zeros(2, np.float32)}, print)


@pytest.mark.parametrize(
    ("dtype", "data", "message"),
    [
        ("F8_E4M3", bytes(2), r"x must be of a dtype that NumPy reads \(F64, .*, got F8_E4M3"),
        ("F32", np.array([1, np.nan], "<f4").tobytes(), "x must be finite as float32, got nan"),
        ("F64", np.array([1e300, 1], "<f8").tobytes(), "x must be finite as float32, got inf"),
        ("C64", bytes(16), "x must be of a dtype"),
    ],
)
def test_values_that_are_no_parameters_are_refused_by_name(tmp_path, dtype, data, message):
    header = {"x": {"dtype": dtype, "shape": [2], "data_offsets": [0, len(data)]}}
    path, lines = tensors(tmp_path / "model.safetensors", header, data), []
    with pytest.raises(UserError, match="does not fit the model: 1 parameters, first "):
        export.read(path, {"x": np.zeros(2, np.float32)}, lines.append)
    assert re.search(message, "".join(lines))


def test_other_dtypes_are_converted(tmp_path):
    given = {name: jnp.array([1.5, 2], dtype) for name, dtype in (("a", jnp.bfloat16), ("b", jnp.float16))}
    export.write(tmp_path / "model.safetensors", given, {}, step=0)
    wanted = {name: np.array([1.5, 2], np.float32) for name in given}
    chex.assert_trees_all_equal(export.read(tmp_path / "model.safetensors", wanted, print), wanted)


@pytest.mark.parametrize("strategy", ["pmap", "sharded"])
def test_an_optimizer_begins_at_the_parameters_that_are_given(strategy):
    """Some keep a copy of them."""
    given = {"w": np.float32([7, 7])}
    setup = SimpleNamespace(
        initial=given,
        strategy=make_strategy(config.ParallelConfig(strategy, fsdp=1 if strategy == "pmap" else 2)),
        experiment=SimpleNamespace(model=None, seed=0),
        optimizer=optax.GradientTransformation(lambda params: params, None),
    )
    state = initial_state(setup)
    chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), (given, given))


@pytest.mark.wide
def test_a_run_starts_from_the_parameters_of_another(experiment, tmp_path, console):
    """The first step of a warm-up changes nothing, and neither does a wrong file."""
    still = with_training(experiment, steps=1)
    model = models.build(dataclasses.replace(still.model, vocab_size=256))
    given, file = init_params(model, 5), tmp_path / "model.safetensors"
    export.write(file, given, config.encode(still), step=0)
    train(still, tmp_path / "run", console, StartOptions(init_from=file))
    chex.assert_trees_all_equal(saved(tmp_path / "run")[2], given)
    wider = dataclasses.replace(still, model=dataclasses.replace(still.model, d_ff=9))
    with pytest.raises(UserError, match="does not fit the model: 3 parameters"):
        train(wider, tmp_path / "other", console, StartOptions(init_from=file))
    assert "blocks_0/mlp/in_proj/kernel must be (8, 9), got (8, 8)" in console.file.getvalue()
    assert not (tmp_path / "other").exists()
    file.unlink()
    train(still, tmp_path / "run", console, StartOptions(init_from=file))  # which has long begun
