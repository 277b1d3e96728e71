"""Damaged or malicious run folders are refused in one line, and nothing outside changes."""

import json
import shutil

import jax
import numpy as np
import pytest
from whole_runs import contents, saved

import hyena_jax
from hyena_jax import cli, config
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import Checkpoints, Meta, saved_steps
from hyena_jax.training.folder import read_folder
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_state

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`


def run(*arguments: object) -> int:
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def folder(whole):
    """A run of 12 steps, to be damaged."""
    return whole


@pytest.fixture
def outside(tmp_path):
    """A folder that must not change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    return folder


@pytest.mark.grid
@pytest.mark.parametrize("is_hard", [False, True])
def test_nothing_is_written_through_links_to_files(folder, outside, is_hard):
    """They are replaced; config.json and data.json link to copies, so that there is a run to continue."""
    names = "metrics.jsonl", "learning_curves.png", "sample.txt", "config.json", "data.json"
    for name in (*names, f".{'0' * 16}.draft"):
        path, target = folder / name, outside / name
        if path.exists():
            shutil.move(path, target)
        else:
            target.write_text("precious")
        path.hardlink_to(target) if is_hard else path.symlink_to(target)
    before = contents(outside)
    sample = ["--logging.sample-tokens", 4]
    assert run("train", "--resume", folder, "--training.steps", 13, *sample) == 0
    assert contents(outside) == before
    left = [path.name for path in folder.iterdir() if path.is_symlink() or path.name.endswith(".draft")]
    assert left in ([], ["data.json"])  # which is unchanged and so not rewritten
    assert read_rows(folder / "metrics.jsonl")[-1]["step"] == 13


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".lock", ".lock must be a file, but is a symbolic link: remove it"),
        ("tensorboard", "tensorboard must be a folder, but is a symbolic link"),
        ("checkpoints", "or a link to a folder that holds only this run's checkpoints"),
        ("profile", "profile must be no link that leads out of the run folder"),
    ],
)
def test_links_that_would_lead_out_are_refused(folder, outside, name, message, capsys):
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "thesis.tex" if name == ".lock" else outside)
    before = contents(folder), contents(outside)
    flags = ["--profile", path] if name == "profile" else []
    assert run("train", "--resume", folder, "--training.steps", 13, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert (contents(folder), contents(outside)) == before


def test_metrics_that_cannot_be_continued_are_refused_before_a_setting_is_changed(folder, capsys):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no row\n")
    before = contents(folder)
    assert run("train", "--resume", folder, "--training.steps", 13) == 2
    assert "metrics.jsonl line 8 is not a row of metrics: 'no row'; remove" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("where", ["another run", "among other things", "nowhere", "what looks like steps"])
def test_checkpoints_may_not_be_those_of_others(folder, trained, outside, where, capsys):
    targets = {"another run": trained / "checkpoints", "nowhere": outside / "nothing"}
    target = targets.get(where, outside)
    if where == "what looks like steps":
        (outside / "thesis.tex").unlink()
        (outside / "2024").mkdir()
        (outside / "2024" / "thesis.tex").write_text("precious")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(target)
    before = contents(trained), contents(outside)
    assert run("train", "--resume", folder, "--training.steps", 13) == 2
    assert "this run's checkpoints" in capsys.readouterr().err
    assert (contents(trained), contents(outside)) == before


@pytest.mark.grid
def test_checkpoints_may_be_on_another_disk(folder, tmp_path, capsys):
    """Moved there, or created there."""
    disk = tmp_path / "disk"
    shutil.move(folder / "checkpoints", disk)
    (folder / "checkpoints").symlink_to(disk)
    assert run("eval", folder) == 0
    assert run("train", "--resume", folder, "--training.steps", 13) == 0
    assert "continuing after step 12" in capsys.readouterr().out
    assert saved_steps(disk)[:2] == [13, 12]
    new, empty = tmp_path / "new", tmp_path / "empty"
    new.mkdir()
    empty.mkdir()
    (new / "checkpoints").symlink_to(empty)
    assert run("train", folder / "config.json", "--workdir", new, "--training.steps", 1) == 0
    assert saved_steps(empty) == [1]


def each_is_refused(folder, tmp_path, capsys) -> list[str]:
    """The error lines of commands, none of which may do anything."""
    lines, before = [], contents(tmp_path)
    for arguments in (
        ["train", "--resume", folder, "--training.steps", 13],
        ["eval", folder],
        ["generate", folder, "--prompt", "the", "--max-new-tokens", 2],
        ["export", folder, "--output", tmp_path / "out.safetensors"],
    ):
        assert run(*arguments) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert len(errors) == 1
        lines += errors
        assert contents(tmp_path) == before
    return lines


@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_a_bit_that_flipped_in_a_setting_is_refused(folder, tmp_path, name, capsys):
    path = folder / name
    key = b'"vocab_size"' if name == "config.json" else b'"fingerprint"'
    data = bytearray(path.read_bytes())
    assert key in data
    data[data.index(key) + len(key) + 4] ^= 1
    path.write_bytes(data)
    for line in each_is_refused(folder, tmp_path, capsys):
        assert name in line
        assert "it was damaged or edited" in line


def test_a_setting_that_was_edited_on_purpose_is_read(folder, capsys):
    """As the message says: without the digest, like folders of earlier versions."""
    values = json.loads((folder / "config.json").read_text())
    del values["sha256"]
    values["training"]["steps"] = 13
    (folder / "config.json").write_text(json.dumps(values))
    assert run("train", "--resume", folder) == 0
    assert saved_steps(folder / "checkpoints")[0] == 13
    assert "sha256" in json.loads((folder / "config.json").read_text())


def poison(folder, value: float) -> str:
    """Rewrites the newest checkpoint with one entry not finite; returns the parameter's name."""
    checkpoints, (step, _, params) = folder / "checkpoints", saved(folder)
    state = init_state(params, make_optimizer(read_folder(folder).experiment.optimizer, params, 12))
    params["final_norm"]["scale"] = np.where(np.arange(8) == 3, value, 1.0).astype(np.float32)
    state = jax.device_get(state._replace(params=params, step=np.int32(step)))
    shutil.rmtree(checkpoints / str(step))
    with Checkpoints(checkpoints, 2, print) as opened:
        opened.save(Meta(step, 1.0), state.to_items())
    return "final_norm/scale"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_parameters_that_are_not_finite_are_refused_by_name(folder, tmp_path, value, capsys):
    name = poison(folder, value)
    for line in each_is_refused(folder, tmp_path, capsys):
        assert f"cannot be used: parameter {name} is not finite" in line


def test_a_run_is_trained_from_its_own_settings_in_python(folder):
    assert hyena_jax.train(None, folder, quiet=True).step == 12
    assert config.load(str(folder / "config.json")) == read_folder(folder).experiment
    with pytest.raises(UserError, match="holds no run"):
        hyena_jax.train(None, folder.parent)
