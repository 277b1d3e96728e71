import json
import shutil
import signal

import numpy as np
import pytest

from hyena_jax.config import UserError
from hyena_jax.training.checkpoint import (
    Best,
    Checkpoints,
    best,
    restore_readonly,
    saved_steps,
)
from hyena_jax.training.manifest import is_damaged


def items(step: int) -> dict:
    params = {"w": np.full((40, 40), step, np.float32), "b": np.arange(3, dtype=np.float32)}
    return {"params": params, "train_state": {"step": np.array(step, np.int32)}}


def save_all(folder, losses: dict[int, float | None], keep: int = 2) -> None:
    with Checkpoints(folder, keep, print) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, items(step), {"step": step, "loss": loss})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints"
    save_all(folder, {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None})
    return folder


def restore(folder):
    lines = []
    with Checkpoints(folder, 2, lines.append) as checkpoints:
        return checkpoints.restore(items(0)), lines


def damage(checkpoint, how: str) -> None:
    files = sorted(p for p in (checkpoint / "params").rglob("*") if p.is_file() and p.stat().st_size > 20)
    if how == "flipped bit":
        data = bytearray(files[-1].read_bytes())
        data[10] ^= 1
        files[-1].write_bytes(data)
    elif how == "truncated":
        files[-1].write_bytes(files[-1].read_bytes()[:-7])
    elif how == "half deleted":
        shutil.rmtree(checkpoint / "params" / "d")
    elif how == "broken manifest":
        (checkpoint / "manifest.json").write_text("{")


def test_nothing_saved_yet(tmp_path):
    assert restore(tmp_path / "none") == (None, [])
    assert best(tmp_path / "none") == Best(None, float("inf"))


def test_the_latest_and_the_best_are_kept_and_whole(folder):
    assert saved_steps(folder) == [5, 4, 2]
    assert best(folder) == Best(2, 1.0)
    assert not any(is_damaged(folder / str(step)) for step in (5, 4, 2))


def test_a_later_process_still_knows_the_best(folder):
    save_all(folder, {6: None, 7: 1.5})
    assert saved_steps(folder) == [7, 6, 2]


def test_what_was_saved_comes_back(folder):
    restored, lines = restore(folder)
    assert (restored.step, restored.meta) == (5, {"step": 5, "loss": None})
    np.testing.assert_array_equal(restored.items["params"]["w"], items(5)["params"]["w"])
    assert restored.items["train_state"]["step"] == 5
    assert lines == []


@pytest.mark.parametrize("how", ["flipped bit", "truncated", "half deleted", "broken manifest"])
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(folder, how):
    damage(folder / "5", how)
    restored, lines = restore(folder)
    assert restored.step == 4
    assert lines == ["checkpoint 5 is damaged: set aside as 5.damaged"]
    assert saved_steps(folder) == [4, 2]
    save_all(folder, {5: None})
    assert restore(folder)[0].step == 5


def test_reading_alone_changes_nothing(folder):
    damage(folder / "5", "truncated")
    lines = []
    assert restore_readonly(folder, {"params": items(0)["params"]}, lines.append).step == 4
    assert lines == ["checkpoint 5 is damaged"]
    assert saved_steps(folder) == [5, 4, 2]
    with pytest.raises(UserError, match="holds no usable checkpoint"):
        restore_readonly(folder, {"params": items(0)["params"]}, lines.append, step=5)


def test_a_checkpoint_without_manifest_is_used_and_reported(folder):
    (folder / "5" / "manifest.json").unlink()
    restored, lines = restore(folder)
    assert restored.step == 5
    assert lines == ["checkpoint 5 is unverified: the run was stopped before its digests were written"]


def test_a_damaged_checkpoint_without_manifest_is_noticed_too(folder):
    (folder / "5" / "manifest.json").unlink()
    damage(folder / "5", "half deleted")
    assert restore(folder)[0].step == 4


def test_all_damaged_is_an_error_that_deletes_nothing(folder):
    for step in (2, 4, 5):
        damage(folder / str(step), "truncated")
    with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
        restore(folder)
    assert saved_steps(folder) == [5, 4, 2]
    with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
        restore(folder)


def test_a_whole_checkpoint_of_another_model_is_refused_and_kept(folder):
    other = items(0)
    other["params"]["extra"] = np.zeros(2, np.float32)
    with (
        pytest.raises(UserError, match="is whole, but does not fit this model"),
        Checkpoints(folder, 2, print) as c,
    ):
        c.restore(other)
    assert saved_steps(folder) == [5, 4, 2]


def test_a_checkpoint_of_another_shape_is_refused_and_kept(folder):
    other = items(0)
    other["params"]["w"] = np.zeros((40, 41), np.float32)
    with (
        pytest.raises(UserError, match="does not fit this model: params/w is"),
        Checkpoints(folder, 2, print) as c,
    ):
        c.restore(other)
    assert saved_steps(folder) == [5, 4, 2]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    save_all(tmp_path / "c", {1: 1.0, 2: 2.0, 3: float("nan"), 4: None, 5: None}, keep=1)
    assert saved_steps(tmp_path / "c") == [5, 1]
    assert best(tmp_path / "c") == Best(1, 1.0)


def test_a_full_disk_is_an_os_error_and_the_old_checkpoints_stay(folder):
    import resource

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            pytest.raises(OSError, match="could not be written"),
            Checkpoints(folder, 2, print) as checkpoints,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
            noise = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
            changed = {**items(6), "params": {"w": noise, "b": np.zeros(3, np.float32)}}
            checkpoints.save(6, changed, {"step": 6, "loss": None})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
    assert restore(folder)[0].step == 5


def test_names_that_are_no_steps_are_no_checkpoints(folder):
    for name in ("007", "notes.txt", "٣"):
        (folder / name).mkdir()
    assert saved_steps(folder) == [5, 4, 2]


def test_an_unfinished_save_is_no_checkpoint(folder):
    (folder / "6.orbax-checkpoint-tmp").mkdir()
    assert restore(folder)[0].step == 5


def test_saving_a_step_twice_is_an_error(folder):
    with Checkpoints(folder, 2, print) as checkpoints, pytest.raises(Exception, match="5"):
        checkpoints.save(5, items(5), {"step": 5, "loss": None})


def test_the_manifest_names_every_file(folder):
    names = set(json.loads((folder / "5" / "manifest.json").read_text()))
    files = {str(p.relative_to(folder / "5")) for p in (folder / "5").rglob("*") if p.is_file()}
    assert files == names | {"manifest.json"}
