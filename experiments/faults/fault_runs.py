"""Runs of `hyena-jax train` to harm, and their comparison with an undisturbed run."""

import hashlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from tensorboardX.proto.event_pb2 import Event, SessionLog

from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.metrics import read_rows

STEPS, HALF, EVERY = 60, 30, 5
FLAGS = f"""
    --model.n-layers 1 --model.d-model 32 --model.d-ff 32 --model.max-len 32 --model.dropout 0.1
    --data.seq-len 32 --data.batch-size 4
    --optimizer.schedule.decay-steps {STEPS} --optimizer.schedule.warmup-steps 10
    --training.eval-every 10 --training.eval-windows 16 --training.eval-batch-size 16
    --training.checkpoint-every {EVERY} --training.log-every 1 --parallel.devices 1 --logging.sample-tokens 0
""".split()
TEXT = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(999, 0, -1))
LONGEST = 600.0
"""Seconds after which a run counts as hanging."""


class NotSurvived(Exception):
    """A run did not behave as promised."""


def demand(condition: object, what: str) -> None:
    """Raises NotSurvived unless the condition holds."""
    if not condition:
        raise NotSurvived(what)


@dataclass(frozen=True)
class Lab:
    """The folder of all runs: `text.txt`, a cache of compiled programs, and a folder per run."""

    root: Path
    spec: str = "shakespeare_cpu"
    flags: tuple[str, ...] = tuple(FLAGS)

    def open(self) -> "Lab":
        """Writes the text that all runs train on."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.text.write_text(TEXT)
        return self

    @property
    def text(self) -> Path:
        return self.root / "text.txt"

    def environment(self) -> dict[str, str]:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # JAX, which this program imports, sets it to 1, and XLA's log would fill the pipes.
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return {**os.environ, "JAX_PLATFORMS": "cpu", **cache}

    def start(
        self,
        workdir: Path,
        *flags: object,
        steps: int = STEPS,
        prefix: tuple[str, ...] = (),
        launch: tuple[object, ...] | None = None,
    ) -> "Started":
        """Starts a training; `flags` replace those of the same name that every training has.

        Args:
          launch: flags of the launcher that starts it in several processes; None starts one, without.
        """
        launcher = [] if launch is None else ["launch", *launch, "--"]
        own = ["--workdir", workdir, "--data.path", self.text, *self.flags, "--training.steps", steps]
        values: dict[str, list[str]] = {}
        for word in map(str, [*own, *flags]):
            if word.startswith("--"):
                values[flag := word] = [word]
            else:
                values[flag].append(word)
        chosen = [word for words in values.values() for word in words]
        return self.command(*launcher, "train", self.spec, *chosen, prefix=prefix)

    def command(self, *arguments: object, prefix: tuple[str, ...] = ()) -> "Started":
        """Starts any `hyena-jax` command."""
        line = [*prefix, sys.executable, "-m", "hyena_jax", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return Started(subprocess.Popen(line, env=self.environment(), **pipes))

    def train(self, workdir: Path, *flags: object, steps: int = STEPS, code: int = 0) -> "Ended":
        """Trains to the end and demands that exit code."""
        ended = self.start(workdir, *flags, steps=steps).wait()
        ended.demand_code(code)
        return ended


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """The whole output, with wrapped lines joined."""
        return " ".join((self.out + " " + self.err).split())

    def demand_code(self, code: int) -> None:
        """Demands the exit code, no traceback and, after an error, one line of ours."""
        demand(self.code == code, f"exit code {self.code} instead of {code}: {self.text[-600:]}")
        demand("Traceback" not in self.text, f"a traceback: {self.text[-1500:]}")
        if code:
            lines = self.err.strip().splitlines()
            start = "hyena-jax: " if code in (75, 130) else "hyena-jax: error: "
            ours = [line for line in lines if line.startswith(start)]
            demand(len(ours) == len(lines) == 1, f"not one line on the standard error: {self.err[-1500:]}")

    def demand_text(self, pattern: str) -> str:
        """Demands a match of the pattern in the output, and returns it."""
        found = re.search(pattern, self.text)
        demand(found, f"nothing like {pattern!r} was said: {self.text[-600:]}")
        return found.group()


@dataclass(frozen=True)
class Started:
    """A running command."""

    process: subprocess.Popen

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> Ended:
        """Waits until the command ends."""
        try:
            out, err = self.process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise NotSurvived(f"it hung for {LONGEST:.0f} s") from None
        return Ended(self.process.returncode, out, err)

    def kill(self) -> Ended:
        """Kills the command by SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        return self.wait()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds; False if the command ended before."""
        while self.is_running:
            if condition():
                return True
            time.sleep(0.0002)
        return False


def last_row(workdir: Path) -> int:
    """The step of the last whole row of metrics; 0 if there is none."""
    rows = read_rows(workdir / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def newest(workdir: Path) -> int:
    """The step of the newest committed checkpoint; 0 if there is none."""
    return max(saved_steps(workdir / "checkpoints"), default=0)


def rows_without_times(workdir: Path) -> list[dict]:
    """The metrics without the values that depend on the clock."""
    rows = read_rows(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "time" and not by_clock(k)} for row in rows]


def by_clock(name: str) -> bool:
    """Whether a metric depends on the clock."""
    return name.startswith("goodput/") or name.endswith(("_per_second", "data_wait"))


def state_digest(workdir: Path, step: int) -> str:
    """SHA-256 of every leaf of a checkpoint: parameters, optimizer state, step."""
    names = ("params", "train_state")
    handlers = {name: ocp.StandardCheckpointHandler() for name in names}
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(**handlers, meta=ocp.JsonCheckpointHandler())
    ) as checkpointer:
        folder = (workdir / "checkpoints" / str(step)).absolute()
        about = checkpointer.metadata(folder).item_metadata
        # As NumPy arrays, whichever devices held the leaves when they were saved.
        targets = jax.tree.map(
            lambda leaf: np.empty(leaf.shape, leaf.dtype), {name: about[name] for name in names}
        )
        arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        found = checkpointer.restore(folder, args=ocp.args.Composite(**arguments))
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path({name: found[name] for name in names}):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def demand_same_end(workdir: Path, whole: Path) -> None:
    """Demands that a run ended as the undisturbed one: state, metrics, TensorBoard, no leftover files."""
    step = newest(workdir)
    demand(step == newest(whole), f"it ended at step {step}")
    demand(state_digest(workdir, step) == state_digest(whole, step), "other parameters or optimizer state")
    rows, expected = rows_without_times(workdir), rows_without_times(whole)
    trained = [row["step"] for row in rows if "train/loss" in row]
    demand(trained == list(range(1, step + 1)), f"steps in metrics.jsonl: {trained}")
    demand(rows == expected, "other metrics")
    shown = tensorboard_steps(workdir / "tensorboard", "train/loss")
    demand(shown == trained, f"steps in TensorBoard: {shown}")
    aside = re.compile(r"/[0-9]+\.(damaged|unverified)")  # kept as they were
    remains = [
        path.name
        for path in workdir.rglob("*")
        if path.name.endswith((".draft", "-tmp")) and not aside.search(str(path.relative_to(workdir)))
    ]
    demand(not remains, f"remains: {remains}")


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    """Steps of a scalar as TensorBoard shows them: a restart discards steps from its first one on."""
    steps: list[int] = []
    for file in sorted(folder.iterdir()):
        for event in _events(file.read_bytes()):
            if event.session_log.status == SessionLog.START:
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == tag]
    return steps


def _events(data: bytes) -> list[Event]:
    """TFRecords: length, its checksum, event, its checksum; the last one may be cut short."""
    events, at = [], 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 16 + size > len(data):
            break
        events.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return events
