import errno
import json
import math
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
import tensorstore

from hyena_jax.config import OPTIMIZER_CONFIGS
from hyena_jax.system.errors import UserError
from hyena_jax.training import checkpoint, checkpoint_files
from hyena_jax.training.checkpoint import Best, Checkpoints, Meta, best, restore_readonly, saved_steps
from hyena_jax.training.checkpoint_files import damage_in, write_manifest
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import TrainState, init_state


def items(step: int) -> dict:
    params = {"w": np.full((40, 40), step, np.float32), "b": np.arange(3, dtype=np.float32)}
    return {"params": params, "train_state": {"step": np.array(step, np.int32)}}


def save_all(folder, losses: dict[int, float | None], keep: int = 2) -> None:
    with Checkpoints(folder, keep, print) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(Meta(step, loss), items(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """To be copied, not changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save_all(folder, {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restore(folder, target=None):
    """What a run that goes on gets, and what it is told."""
    lines = []
    with Checkpoints(folder, 2, lines.append) as checkpoints:
        return checkpoints.restore(items(0) if target is None else target), lines


def read(folder, step=None):
    """The same for a reader of the parameters, who may change nothing."""
    lines = []
    return restore_readonly(folder, {"params": items(0)["params"]}, lines.append, step=step), lines


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def declare(checkpoint, name: str, content: bytes | None = None, **changes) -> None:
    """Changes an array's zarr metadata and rewrites the manifest, as an attacker would."""
    base = {"driver": "file", "path": f"{checkpoint / 'params'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    about = json.loads(store.read(f"{name}/.zarray").result().value) | changes
    store.write(f"{name}/.zarray", json.dumps(about).encode() if content is None else content).result()
    write_manifest(checkpoint)


def damage(checkpoint, how: str = "flipped bit") -> None:
    if how == "flipped bit":
        files = (checkpoint / "params").rglob("*")
        path = max(path for path in files if path.is_file() and path.stat().st_size > 20)
        data = bytearray(path.read_bytes())
        data[10] ^= 1
        path.write_bytes(data)
    elif how == "half deleted":
        shutil.rmtree(checkpoint / "params" / "d")
    elif how == "broken manifest":
        (checkpoint / "manifest.json").write_text("{")
    elif how in ("link", "pipe"):
        path = checkpoint / "params" / "_METADATA"
        path.unlink()
        path.symlink_to("/dev/zero") if how == "link" else os.mkfifo(path)


def test_nothing_saved_yet(tmp_path):
    assert restore(tmp_path / "none") == (None, [])
    assert best(tmp_path / "none") == Best(None, float("inf"))


def test_the_latest_and_the_best_are_kept_and_whole_and_a_later_process_still_knows_the_best(folder):
    assert saved_steps(folder) == [5, 4, 2]
    assert best(folder) == Best(2, 1.0)
    assert not any(damage_in(folder / str(step)) for step in (5, 4, 2))
    digests = set(json.loads((folder / "5" / "manifest.json").read_text()))
    assert {*map(str, contents(folder / "5"))} == digests | {"manifest.json"}
    save_all(folder, {6: None, 7: 1.5})
    assert saved_steps(folder) == [7, 6, 2]


def test_what_was_saved_comes_back(folder):
    restored, lines = restore(folder)
    assert (restored.step, restored.meta) == (5, Meta(5))
    np.testing.assert_array_equal(restored.items["params"]["w"], items(5)["params"]["w"])
    assert restored.items["train_state"]["step"] == 5
    assert lines == []


def test_the_state_of_every_optimizer_comes_back_to_the_bit(tmp_path):
    draw, shapes, states = np.random.default_rng(0), {}, {}
    params = {"blocks_0": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4, np.float32)}}
    for name, config in OPTIMIZER_CONFIGS.items():
        optimizer = make_optimizer(config(), params, 10)
        shapes[name] = jax.eval_shape(lambda optimizer=optimizer: init_state(params, optimizer))
        states[name] = jax.tree.map(
            lambda leaf: draw.uniform(-99, 99, leaf.shape).astype(leaf.dtype), shapes[name]
        )
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        checkpoints.save(Meta(1), {name: state.to_items() for name, state in states.items()})
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        found = checkpoints.restore({name: shape.to_items() for name, shape in shapes.items()}).items
    for name, state in states.items():
        chex.assert_trees_all_equal_shapes_and_dtypes(TrainState.from_items(found[name]), state)
        jax.tree.map(np.testing.assert_array_equal, TrainState.from_items(found[name]), state)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("flipped bit", "is not what was saved"),
        ("half deleted", "is missing"),
        ("broken manifest", "manifest.json"),
        ("link", "params/_METADATA is not a regular file"),
        ("pipe", "params/_METADATA is not a regular file"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(folder, how, why):
    damage(folder / "5", how)
    for reader, said, left in (
        (read, "checkpoint 5 is damaged (", [5, 4, 2]),
        (restore, "checkpoint 5 is damaged: set aside as 5.damaged (", [4, 2]),
    ):
        restored, (line,) = reader(folder)
        assert restored.step == 4
        assert line.startswith(said)
        assert why in line
        assert saved_steps(folder) == left
    save_all(folder, {5: None})
    assert restore(folder)[0].step == 5


def test_a_damaged_checkpoint_is_not_read_where_it_is_asked_for(folder):
    damage(folder / "5")
    with pytest.raises(UserError, match=r"step must be one of the undamaged of \[5, 4, 2\], got 5: params"):
        read(folder, 5)


UNVERIFIED = "(the run was stopped before its digests were written)"


def test_the_newest_verified_checkpoint_is_used(folder):
    """A newer damaged checkpoint is skipped and kept, out of the way of the next save."""
    (folder / "5" / "manifest.json").unlink()
    before = contents(folder / "5")
    restored, lines = read(folder)
    assert restored.step == 4
    assert lines == [f"checkpoint 5 is unverified {UNVERIFIED} and not used"]
    restored, lines = restore(folder)
    assert restored.step == 4
    assert lines == [f"checkpoint 5 is unverified: set aside as 5.unverified {UNVERIFIED}"]
    assert contents(folder / "5.unverified") == before
    save_all(folder, {5: None})
    assert restore(folder)[0].step == 5


def test_an_unverified_checkpoint_is_used_where_no_other_can_be(folder):
    for step in (2, 4, 5):
        (folder / str(step) / "manifest.json").unlink()
    shutil.rmtree(folder / "5" / "params" / "d")
    restored, lines = restore(folder)
    assert restored.step == 4
    assert lines[0] == f"checkpoint 4 is unverified {UNVERIFIED} and used: no other can be"
    assert lines[1].startswith("checkpoint 5 is damaged: set aside as 5.damaged (")
    asked, lines = read(folder, 2)
    assert (asked.step, lines) == (2, [f"checkpoint 2 is unverified {UNVERIFIED}"])


def test_nothing_that_was_set_aside_is_overwritten(folder):
    for content in ("first", "second"):
        damage(folder / "5")
        (folder / "5" / "notes.txt").write_text(content)
        restore(folder)
        save_all(folder, {5: None})
    found = {path.name: (path / "notes.txt").read_text() for path in folder.glob("5.damaged*")}
    assert found == {"5.damaged": "first", "5.damaged.1": "second"}


@pytest.mark.parametrize("verified", [True, False])
def test_a_folder_of_another_step_is_damaged(folder, verified):
    shutil.rmtree(folder / "5")
    shutil.copytree(folder / "2", folder / "5")
    if not verified:
        for step in (2, 4, 5):
            (folder / str(step) / "manifest.json").unlink()
    assert best(folder) == Best(2, 1.0)
    restored, lines = restore(folder)
    assert restored.step == 4
    assert "checkpoint 5 is damaged: set aside as 5.damaged (it is a checkpoint of step 2)" in lines


def test_links_are_set_aside_and_what_they_name_stays(folder, tmp_path):
    """Also a link older than the checkpoint in use, which Orbax would fail to delete."""
    outside = tmp_path / "outside"
    shutil.move(folder / "2", outside)
    (folder / "2").symlink_to(outside)
    (folder / "7").symlink_to(tmp_path / "nowhere")
    (folder / "9.orbax-checkpoint-tmp").symlink_to(outside)
    before = contents(outside)
    assert read(folder)[0].step == 5
    lines = []
    with Checkpoints(folder, 1, lines.append) as checkpoints:
        assert checkpoints.restore(items(0)).step == 5
        for step in (8, 9):
            checkpoints.save(Meta(step), items(step))
    assert lines == [
        "checkpoint 2 is damaged: set aside as 2.damaged (it is a symbolic link)",
        "checkpoint 7 is damaged: set aside as 7.damaged (it is a symbolic link)",
    ]
    assert contents(outside) == before
    assert saved_steps(folder) == [9, 8, 4]


def test_a_folder_that_is_a_link_is_used(folder, tmp_path):
    disk = tmp_path / "disk"
    shutil.move(folder, disk)
    folder.symlink_to(disk)
    damage(folder / "5")
    with Checkpoints(folder, 2, print) as checkpoints:
        assert checkpoints.restore(items(0)).step == 4
        for step in (5, 6):
            checkpoints.save(Meta(step), items(step))
    assert folder.is_symlink()
    assert saved_steps(folder) == saved_steps(disk) == [6, 5, 2]
    assert (disk / "5.damaged").is_dir()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**6, 10**6], "chunks": [10**6, 10**6]},
        {"shape": [1600], "chunks": [1600]},
        {"shape": 40},
        {"chunks": [40, 10**6]},
        {"chunks": [0, 40]},
        {"chunks": None},
        {"dtype": "<f8"},
        {"dtype": [["a", "<f4"]]},
    ],
    ids=str,
)
def test_what_is_declared_is_compared_before_anything_is_allocated(folder, changes):
    declare(folder / "5", "w", **changes)
    for reader in (restore, read):
        with pytest.raises(UserError, match="5 is whole, but does not fit this model: params/w "):
            reader(folder)
    assert saved_steps(folder) == [5, 4, 2]


@pytest.mark.grid
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", 9000 * b"["])
def test_what_is_declared_must_be_json(folder, content):
    declare(folder / "5", "w", content=content)
    with pytest.raises(UserError, match="does not fit this model: its arrays cannot be read"):
        restore(folder)


def test_all_damaged_is_an_error_that_deletes_nothing(folder):
    for step in (2, 4, 5):
        damage(folder / str(step))
    for _ in range(2):
        with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
            restore(folder)
        assert saved_steps(folder) == [5, 4, 2]


@pytest.mark.parametrize(
    ("name", "shape", "message"), [("extra", (2,), "params/extra is missing"), ("w", (40, 41), "params/w is")]
)
def test_a_whole_checkpoint_of_another_model_is_refused_and_kept(folder, name, shape, message):
    other = items(0)
    other["params"][name] = np.zeros(shape, np.float32)
    with pytest.raises(UserError, match=f"is whole, but does not fit this model: {message}"):
        restore(folder, other)
    assert saved_steps(folder) == [5, 4, 2]


def test_only_losses_on_the_rows_of_the_newest_are_compared(tmp_path):
    metas = {1: (1.0, "a"), 2: (3.0, "b"), 3: (2.0, "b"), 4: (None, None)}
    with Checkpoints(tmp_path, 4, print) as checkpoints:
        for step, (loss, rows) in metas.items():
            about = {} if rows is None else {"measured_on": rows}
            checkpoints.save(Meta(step, loss, **about), items(step))
    assert best(tmp_path) == Best(3, 2.0, "b")
    with Checkpoints(tmp_path, 4, print) as again:
        assert [again.best_loss(rows) for rows in "ab"] == [math.inf, 2.0]


def test_a_checkpoint_by_the_clock_pushes_out_no_other(tmp_path):
    with Checkpoints(tmp_path, 2, print) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(Meta(step=step, loss=None, timed=step in (2, 4)), items(step))
    assert saved_steps(tmp_path) == [5, 4, 3]
    with Checkpoints(tmp_path, 2, print) as checkpoints:
        checkpoints.save(Meta(step=6, timed=True), items(6))
    assert saved_steps(tmp_path) == [6, 5, 3]


def test_a_loss_that_is_known_later_changes_no_array(folder):
    """A kill while it is written would otherwise lose the newest checkpoint."""
    before = contents(folder)
    with Checkpoints(folder, 2, print) as checkpoints:
        checkpoints.revise(Meta(5, 0.5))
    after = contents(folder)
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed == {"revised.json", "manifest.json"}
    assert best(folder) == Best(5, 0.5)
    restored, lines = restore(folder)
    assert (restored.meta, lines) == (Meta(5, 0.5), [])
    (folder / "5" / "revised.json").write_text("{}")
    assert damage_in(folder / "5") == "revised.json is not what was saved"


def test_a_kill_before_the_digest_of_a_later_loss_does_no_harm(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "is_verified", lambda folder: False)  # ends there
    with Checkpoints(folder, 2, print) as checkpoints:
        checkpoints.revise(Meta(5, 0.5))
    monkeypatch.undo()
    assert damage_in(folder / "5") is None
    restored, lines = restore(folder)
    assert (restored.meta, lines) == (Meta(5, 0.5), [])


def test_an_error_of_the_machine_is_no_damage(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before = contents(folder)
    monkeypatch.setattr(checkpoint_files.hashlib, "file_digest", fails)
    with pytest.raises(OSError, match="5 cannot be read: "):
        restore(folder)
    assert contents(folder) == before


def test_a_checkpoint_that_memory_does_not_hold_is_not_said_to_be_unfit(folder, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", fails)
    with pytest.raises(OSError, match="5 could not be read: RuntimeError: RESOURCE_EXHAUSTED"):
        restore(folder)


def test_a_damaged_best_checkpoint_is_set_aside(folder):
    damage(folder / "2")
    restored, lines = restore(folder)
    assert restored.step == 5
    assert [line.partition(" (")[0] for line in lines] == ["checkpoint 2 is damaged: set aside as 2.damaged"]
    assert best(folder).step == 4
    assert restore(folder)[1] == []


def test_a_kill_before_the_manifest_costs_one_checkpoint_even_if_one_is_kept(tmp_path, monkeypatch):
    save_all(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}, keep=1)
    assert saved_steps(tmp_path) == [3, 2, 1]  # 2 had its manifest when 3 was saved
    monkeypatch.setattr(checkpoint_files, "write_manifest", lambda folder: None)  # killed there
    save_all(tmp_path, {4: 4.0}, keep=1)
    assert restore(tmp_path)[0].step == 3


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_said_to_be_unfit(folder, monkeypatch):
    """As by a run that goes on and keeps newer ones."""
    usual = checkpoint.misfit

    def misfit(store, targets):
        if store("params")["path"] == f"{folder / '5'}/params/":
            shutil.rmtree(folder / "5")
            return "params/w is missing"
        return usual(store, targets)

    monkeypatch.setattr(checkpoint, "misfit", misfit)
    assert read(folder)[0].step == 4


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    save_all(tmp_path / "c", {1: 1.0, 2: 2.0, 3: float("nan"), 4: None, 5: None}, keep=1)
    assert saved_steps(tmp_path / "c") == [5, 4, 1]
    assert best(tmp_path / "c") == Best(1, 1.0)


def test_a_full_disk_is_an_os_error_and_the_old_checkpoints_stay(folder):
    import resource

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        unwritten = pytest.raises(OSError, match="could not be written")
        with unwritten, Checkpoints(folder, 2, print) as checkpoints:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
            changed = items(6)
            changed["params"]["w"] = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
            checkpoints.save(Meta(6), changed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
    assert restore(folder)[0].step == 5


def test_what_has_no_step_for_a_name_is_no_checkpoint(folder):
    for name in ("007", "notes.txt", "٣", "6.orbax-checkpoint-tmp"):  # the last: a save that was not ended
        (folder / name).mkdir()
    assert saved_steps(folder) == [5, 4, 2]
    assert restore(folder)[0].step == 5


def test_saving_a_step_twice_is_an_error(folder):
    with Checkpoints(folder, 2, print) as checkpoints, pytest.raises(Exception, match="5"):
        checkpoints.save(Meta(5), items(5))
