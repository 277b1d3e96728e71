"""Generated harm to run folders: each command works, or refuses in one line. Run with -m fuzz.

Computation is replaced by stubs: `eval` records the parameters that it was given, `train` saves the restored
state as the next step's.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import tensorstore
from fuzz.test_fuzz import TRAIN, contents, outcome_of

from hyena_jax import api, cli, models
from hyena_jax.training.checkpoint import Checkpoints, Meta, saved_steps
from hyena_jax.training.checkpoint_files import damage_in, write_manifest
from hyena_jax.training.folder import read_folder
from hyena_jax.training.hooks import LiveRun, Now
from hyena_jax.training.initial import load_params

pytestmark = pytest.mark.xdist_group("harmed_folders")

SECONDS = 90
"""Longest that a command may take."""
EVERY = 7
"""One of this many cases runs."""
# The model that is read and traced fastest.
ATTENTION = " ".join(TRAIN).replace("0.filter.width 4", "0.n-heads 2 --model.pattern attention")
ATTENTION = ATTENTION.replace("--no-logging", "--training.steps 4 --training.checkpoint-every 2 --logging")


class Case(NamedTuple):
    """Harm to a run folder; `do(folder, outside)` does it."""

    name: str
    do: Callable[[Path, Path], None]


def paths_of(folder: Path) -> list[str]:
    """All files and folders, in an order that does not depend on random names in checkpoints."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def link(name: str, kind: str, folder: Path, outside: Path) -> None:
    """Puts a link, or an endless file, in place of a file or a folder, or where there is none."""
    path, moved = folder / name, outside / "moved"
    if os.path.lexists(path):
        path.rename(moved)
    elif kind != "dangling":
        moved.write_text("precious")
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "outside":
            path.symlink_to(moved)
        case "dangling":
            path.symlink_to(outside / "nothing")
        case "thesis":
            path.symlink_to(outside / "thesis.tex")
        case "folder":
            path.symlink_to(outside)
        case "hard":
            path.symlink_to(moved) if moved.is_dir() else path.hardlink_to(moved)
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")


WRITTEN = [
    ".lock", "config.json", "data.json", "metrics.jsonl", "learning_curves.png", "sample.txt", "tensorboard",
    "checkpoints", "checkpoints/2", "checkpoints/4", "checkpoints/5", "checkpoints/0", f".{'0' * 16}.draft",
    "checkpoints/5.orbax-checkpoint-tmp", "checkpoints/4.damaged", "checkpoints/4/manifest.json",
]  # fmt: skip
KINDS = ["outside", "dangling", "thesis", "folder", "hard", "pipe", "zero"]


def links(names: list[str]) -> Iterator[Case]:
    for name, kind in itertools.product(WRITTEN, KINDS):
        if name != "checkpoints" or kind not in ("outside", "hard"):  # which may be on another disk
            yield Case(f"{name} is {kind}", partial(link, name, kind))
    for i, name in enumerate(names):
        if name not in WRITTEN:
            kind = KINDS[i % len(KINDS)]
            yield Case(f"{name} is {kind}", partial(link, name, kind))


def flip(name: str, place: float, bit: int, folder: Path, outside: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (folder / name).write_bytes(data)


def flips(folder: Path, names: list[str]) -> Iterator[Case]:
    generator = random.Random("flips")
    for name in names:
        if (folder / name).is_file() and (folder / name).stat().st_size:
            for _ in range(10 if name in ("config.json", "data.json") else 1):
                place, bit = generator.random(), generator.randrange(8)
                yield Case(f"bit {bit} of {name} at {place:.4f}", partial(flip, name, place, bit))


def move(moves: list[tuple[str, str]], copy: bool, manifests: bool, folder: Path, outside: Path) -> None:
    """Renames or copies steps all at once, replacing existing ones."""
    checkpoints, drafts = folder / "checkpoints", outside.parent / "drafts"
    for one, other in moves:
        shutil.copytree(checkpoints / one, drafts / other)
    for one, other in moves:
        if not copy:
            shutil.rmtree(checkpoints / one, ignore_errors=True)
        shutil.rmtree(checkpoints / other, ignore_errors=True)
    for _, other in moves:
        shutil.move(drafts / other, checkpoints / other)
    if not manifests:
        for manifest in checkpoints.glob("*/manifest.json"):
            manifest.unlink()
    shutil.rmtree(drafts)


def moves() -> Iterator[Case]:
    plans = [[(one, to)] for one in "24" for to in ("0", "3", "5", "6", "2147483648")]
    plans += [[("2", "4"), ("4", "2")], [("2", "4")], [("4", "2")], [("2", "10"), ("4", "9")]]
    plans += [[("4", "9" * 30)]]
    for plan, copy, manifests in itertools.product(plans, (False, True), (True, False)):
        how = f"{'copied' if copy else 'moved'}{'' if manifests else ', no manifests'}"
        yield Case(f"steps {plan} {how}", partial(move, plan, copy, manifests))


def declare(item: str, number: int, changes: dict, folder: Path, outside: Path) -> None:
    """Changes an array's zarr metadata and rewrites the manifest."""
    checkpoint = folder / "checkpoints" / "4"
    base = {"driver": "file", "path": f"{checkpoint / item}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = sorted(key for key in store.list().result() if key.endswith(b"/.zarray"))
    key = keys[number % len(keys)]
    about = json.loads(store.read(key).result().value)
    store.write(key, json.dumps(about | changes).encode()).result()
    write_manifest(checkpoint)


DECLARED = [  # other shapes, chunks and dtypes: tests/training/test_checkpoint.py
    {"zarr_format": 3},
    {"compressor": {"id": "nonsense"}},
    {"compressor": None},
    {"filters": [{"id": "delta"}]},
    {"order": "F"},
]


def declarations() -> Iterator[Case]:
    generator = random.Random("declarations")
    for item, changes in itertools.product(("params", "train_state"), DECLARED):
        number = generator.randrange(100)
        yield Case(f"{item} {number} declares {str(changes)[:80]}", partial(declare, item, number, changes))


def metadata(name: str, change: Callable[[str], str], folder: Path, outside: Path) -> None:
    """Changes a JSON file of Orbax or of this package and rewrites the manifest."""
    path = folder / "checkpoints" / "4" / name
    path.write_text(change(path.read_text()))
    write_manifest(folder / "checkpoints" / "4")


METADATA = {
    "nothing": lambda text: "",
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "deep": lambda text: 100_000 * "[" + 100_000 * "]",
    "an object": lambda text: "{}",
    "twice": lambda text: text + text,
    "other shapes": lambda text: text.replace("8", "1000000000"),
    "other types": lambda text: text.replace("jax.Array", "string").replace("4", '"4"'),
    "skipped": lambda text: text.replace('"skip_deserialize": false', '"skip_deserialize": true'),
    "zarr 3": lambda text: text.replace("false", "true"),
    "other keys": lambda text: text.replace("bias", "kernel").replace("loss", "step"),
}


def all_metadata() -> Iterator[Case]:
    names = ["params/_METADATA", "train_state/_METADATA", "params/array_metadatas/process_0"]
    names += ["params/_sharding", "meta/metadata", "_CHECKPOINT_METADATA"]
    for name, (how, change) in itertools.product(names, METADATA.items()):
        yield Case(f"{name} is {how}", partial(metadata, name, change))


def poison(number: int, value: float, folder: Path, outside: Path) -> None:
    """Rewrites the newest checkpoint with an entry that is not finite."""
    run, checkpoints = read_folder(folder), folder / "checkpoints"
    params = load_params(run, models.build(run.experiment.model), "latest", print)[1]
    leaves, structure = jax.tree.flatten(params)
    poisoned = leaves[number % len(leaves)] = leaves[number % len(leaves)].copy()
    poisoned.flat[number % poisoned.size] = value
    shutil.rmtree(checkpoints / "4")
    with Checkpoints(checkpoints, 2, print) as opened:
        opened.save(Meta(4, 1.0), {"params": jax.tree.unflatten(structure, leaves)})


def poisons() -> Iterator[Case]:
    generator = random.Random("poisons")
    for value in (np.nan, np.inf, -np.inf):
        for _ in range(4):
            number = generator.randrange(10**6)
            yield Case(f"parameter {number} is {value}", partial(poison, number, value))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of four steps, with checkpoints of steps 2 and 4."""
    root = tmp_path_factory.mktemp("run_folder")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    flags = ["--workdir", str(root / "run"), "--data.path", str(root / "text.txt")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main([*ATTENTION.split(), *flags]) == 0
    return root / "run"


def digest(run, params) -> str:
    """Of the model and its parameters."""
    found = hashlib.sha256(repr(run.experiment.model).encode())
    for leaf in jax.tree.leaves(params):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def loaded(folder: Path, step: str) -> str:
    run = read_folder(folder)
    return digest(run, load_params(run, models.build(run.experiment.model), step, lambda _: None)[1])


@pytest.fixture(scope="module")
def saved(whole):
    """The parameters that a command may use."""
    return {loaded(whole, step) for step in ("2", "4")}


def save_next(run: LiveRun, step: int, state, metrics=None) -> Now:
    """Replaces training, which ends at once: writes all files of a run without computing."""
    after = state._replace(step=state.step + 1)
    run.log.write(step + 1, {"train/loss": 1.0})
    run.log.sync()
    run.checkpoints.save(Meta(step + 1), run.setup.strategy.to_global(after).to_items())
    return Now(step, state, metrics, is_last=True)


def try_case(case: Case, whole: Path, saved: set[str], root: Path, monkeypatch) -> set[int]:
    """The exit codes of the commands, and what must hold after each."""
    used: list[str] = []

    def note(run, model, params, *_):
        used.append(digest(run, params))
        return {"loss": 1.0}

    monkeypatch.setattr(api, "evaluate_run", note)
    monkeypatch.setattr(LiveRun, "now", save_next)
    monkeypatch.setattr("hyena_jax.training.run.draw_learning_curves", lambda *_: None)
    monkeypatch.setattr("hyena_jax.generation.sample.write_sample", lambda *_: None)
    shutil.rmtree(root, ignore_errors=True)
    folder, outside = root / "run", root / "outside"
    outside.mkdir(parents=True)
    (outside / "thesis.tex").write_text("precious")
    shutil.copytree(whole, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        case.do(folder, outside)
    stays, codes = contents(outside), set()
    for command in (["eval", str(folder)], ["train", "--resume", str(folder), "--training.steps", "5"]):
        before = file_contents(folder)
        code, printed = outcome_of(command, SECONDS)
        codes.add(code)
        assert contents(outside) == stays, f"changed outside by {command[0]}"
        # Orbax reads the times of all steps when it saves.
        assert code != 3 or case.name.startswith("_CHECKPOINT_METADATA"), printed
        if code == 2 or command[0] == "eval":
            kept = {name: data for name, data in file_contents(folder).items() if name != ".lock"}
            assert kept == {name: data for name, data in before.items() if name != ".lock"}, command[0]
        elif code == 0 and "already trained" not in printed:
            checkpoints = folder / "checkpoints"
            assert damage_in(checkpoints / str(saved_steps(checkpoints)[0])) is None
            used.append(loaded(folder, "latest"))
    assert {*used} <= saved, f"others than the parameters that were saved: {codes}"
    return codes


def file_contents(folder: Path) -> dict[str, bytes]:
    """Contents of regular files only: a link may name a device, and a pipe would block."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.fuzz
def test_harm(whole, saved, tmp_path, monkeypatch):
    """Every seventh case, so that each of the generators takes part."""
    names = paths_of(whole)
    cases = [*links(names), *flips(whole, names), *moves(), *declarations(), *all_metadata(), *poisons()]
    assert len(cases) > 400
    codes: set[int] = set()
    for case in cases[::EVERY]:
        try:
            codes |= try_case(case, whole, saved, tmp_path / "case", monkeypatch)
        except BaseException as error:
            error.add_note(f"in the case: {case.name}")
            raise
    assert codes >= {0, 2}  # 3 comes of few
