"""Harm to a run folder: links, swapped steps, flipped bits of settings, false declarations."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import tensorstore
from fault_kills import Stage, Trial
from fault_runs import EVERY, HALF, STEPS, demand, demand_same_end
from fault_storage import contents

from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.checkpoint_files import write_manifest

LINKS = (
    "metrics.jsonl",
    "learning_curves.png",
    "sample.txt",
    "config.json",
    "data.json",
    ".0123456789abcdef.draft",
)
DECLARED = {
    "a million times a million": {"shape": [10**6, 10**6], "chunks": [10**6, 10**6]},
    "large chunks": {"chunks": [10**6, 10**6]},
    "another rank": {"shape": [32], "chunks": [32]},
    "another dtype": {"dtype": "<f8"},
}


def folders(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """Every kind of harm once, and `count` flipped bits of settings."""
    generator = random.Random(f"folders {seed}")
    for name in LINKS:
        yield Trial("a link to a file outside", name, partial(link_to_file, stage, name))
    for name in (".lock", "tensorboard", "checkpoints"):
        yield Trial("a link that leads outside", name, partial(link_outside, stage, name))
    yield Trial("checkpoints moved to another disk", "", partial(other_disk, stage))
    yield Trial("the newest step is a link", "", partial(link_as_step, stage))
    yield Trial("two steps swapped", "", partial(swapped, stage))
    yield Trial("a step copied over another", "", partial(copied, stage))
    for i in range(count):
        name = ("config.json", "data.json")[i % 2]
        harm = partial(flip, name, generator.random())
        yield Trial("a bit of the settings", f"{name} {i + 1}", partial(refused, stage, harm, name))
    for name, changes in DECLARED.items():
        harm = partial(declare, changes)
        yield Trial(
            "a checkpoint that declares", name, partial(refused, stage, harm, "does not fit this model")
        )
    yield Trial("resumed without its flags", "", partial(resumed, stage))


def link_to_file(stage: Stage, name: str, workdir: Path) -> dict:
    """Training replaces the link, and the file that it pointed to stays unchanged."""
    path, outside = stage.copy_half(workdir) / name, workdir.with_name(f"{workdir.name}_outside")
    outside.mkdir()
    if path.exists():
        shutil.move(path, outside / name)
    else:
        (outside / name).write_text("precious")
    path.symlink_to(outside / name)
    before = contents(outside)
    stage.finish(workdir, HALF)
    demand(contents(outside) == before, "a file outside was changed")
    shutil.rmtree(outside)
    return {}


def link_outside(stage: Stage, name: str, workdir: Path) -> dict:
    """The run is refused; once the link is removed, it continues."""
    path, outside = stage.copy_half(workdir) / name, workdir.with_name(f"{workdir.name}_outside")
    kept = workdir.with_name(f"{workdir.name}_kept")
    outside.mkdir()
    (outside / "thesis.tex").write_text("precious")
    shutil.move(path, kept)
    path.symlink_to(outside / "thesis.tex" if name == ".lock" else outside)
    before = contents(workdir), contents(outside)
    stage.lab.train(workdir, code=2).demand_text("link")
    demand((contents(workdir), contents(outside)) == before, "something was changed")
    path.unlink()
    shutil.move(kept, path)
    shutil.rmtree(outside)
    stage.finish(workdir, HALF)
    return {}


def other_disk(stage: Stage, workdir: Path) -> dict:
    disk = workdir.with_name(f"{workdir.name}_disk")
    shutil.move(stage.copy_half(workdir) / "checkpoints", disk)
    (workdir / "checkpoints").symlink_to(disk)
    stage.finish(workdir, HALF)
    demand(saved_steps(disk)[0] == STEPS, "they are not on that disk")
    shutil.rmtree(disk)
    return {}


def link_as_step(stage: Stage, workdir: Path) -> dict:
    """Training sets the link aside, and the checkpoint that it points to stays."""
    outside = workdir.with_name(f"{workdir.name}_outside")
    newest = stage.copy_half(workdir) / "checkpoints" / str(HALF)
    shutil.move(newest, outside)
    newest.symlink_to(outside)
    before = contents(outside)
    text = stage.finish(workdir, HALF - EVERY)
    demand("set aside as" in text and "it is a symbolic link" in text, text[-600:])
    demand(contents(outside) == before, "what the link named was changed")
    shutil.rmtree(outside)
    return {}


def swapped(stage: Stage, workdir: Path) -> dict:
    """Neither is used if there is a third one; otherwise the run is refused, and nothing changes."""
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    one, other, *rest = saved_steps(checkpoints)
    (checkpoints / str(one)).rename(checkpoints / "swap")
    (checkpoints / str(other)).rename(checkpoints / str(one))
    (checkpoints / "swap").rename(checkpoints / str(other))
    if rest:
        demand(f"it is a checkpoint of step {other}" in stage.finish(workdir, rest[0]), "it does not say why")
        return {"continued after": rest[0]}
    before = contents(workdir)
    stage.lab.train(workdir, code=2).demand_text(f"it is a checkpoint of step {other}")
    demand(contents(workdir) == before, "the folder was changed")
    return {"refused": True}


def copied(stage: Stage, workdir: Path) -> dict:
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    older = saved_steps(checkpoints)[1]
    shutil.copytree(checkpoints / str(older), checkpoints / str(HALF + EVERY))
    text = stage.finish(workdir, HALF)
    demand(f"it is a checkpoint of step {older}" in text, text[-600:])
    return {}


def flip(name: str, place: float, workdir: Path) -> None:
    """Flips a bit of a digit, so that the file stays valid JSON; other flips break the JSON."""
    data = bytearray((workdir / name).read_bytes())
    start = data.index(b"\n", data.index(b'"sha256"'))  # the line of the digest comes first
    digits = [i for i in range(start, len(data)) if chr(data[i]).isdigit()]
    data[digits[int(place * len(digits))]] ^= 1
    (workdir / name).write_bytes(data)


def declare(changes: dict, workdir: Path) -> None:
    """Changes zarr's metadata of the embedding, and rewrites the manifest."""
    checkpoint = workdir / "checkpoints" / str(HALF)
    base = {"driver": "file", "path": f"{checkpoint / 'params'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    key = "embedding.embedding/.zarray"
    about = json.loads(store.read(key).result().value)
    store.write(key, json.dumps(about | changes).encode()).result()
    write_manifest(checkpoint)


def refused(stage: Stage, harm: Callable[[Path], None], message: str, workdir: Path) -> dict:
    """`eval` and `train` both refuse the run, and nothing changes."""
    harm(stage.copy_half(workdir))
    before = contents(workdir)
    ended = stage.lab.command("eval", workdir).wait()
    ended.demand_code(2)
    ended.demand_text(message)
    stage.lab.train(workdir, code=2).demand_text(message)
    demand(contents(workdir) == before, "the folder was changed")
    return {}


def resumed(stage: Stage, workdir: Path) -> dict:
    ended = stage.lab.command("train", "--resume", stage.copy_half(workdir), "--training.steps", STEPS).wait()
    ended.demand_code(0)
    ended.demand_text(f"continuing after step {HALF} ")
    demand_same_end(workdir, stage.whole)
    return {}
