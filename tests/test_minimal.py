"""The file that one can hold trains as the package does, bit for bit, and continues after a kill."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import hyena_jax
from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    LoggingConfig,
    TrainingConfig,
)

PROGRAM = Path(__file__).parents[1] / "experiments" / "minimal" / "train.py"
QUICK = {"LOG_EVERY": 1, "EVAL_ROWS": 20, "SAMPLE_TOKENS": 20}
SMALL = {**QUICK, "N_LAYERS": 1, "D_MODEL": 16, "D_FF": 16}
MIXED = {
    **SMALL,
    "MIXERS": (HyenaConfig(), HawkConfig(), LocalAttentionConfig(n_heads=2)),
    "N_LAYERS": 3,
    "DROPOUT": 0.1,
    "DTYPE": "bfloat16",
}
CHANGED = """
import json, runpy, sys
from pathlib import Path
program, changes, workdir, steps = sys.argv[1:]
train = runpy.run_path(program)["train"]
train.__globals__.update(json.loads(changes))
train(Path(workdir), int(steps))
"""


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(compiled_once) -> None:
    """Each test here trains a model several times."""


def program(**changes: object) -> ModuleType:
    """The file, with other constants."""
    spec = importlib.util.spec_from_file_location("minimal", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in changes.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    return module


def experiment_of(minimal: ModuleType) -> Experiment:
    """What the package trains with the same settings."""
    positions, *others = HYENA_GROUPS
    return Experiment(
        seed=minimal.SEED,
        data=minimal.DATA,
        model=LanguageModelConfig(
            pattern=minimal.MIXERS,
            n_layers=minimal.N_LAYERS,
            d_model=minimal.D_MODEL,
            d_ff=minimal.D_FF,
            max_len=minimal.SEQ_LEN,
            dropout=minimal.DROPOUT,
            dtype=minimal.DTYPE,
        ),
        optimizer=AdamWConfig(
            learning_rate=minimal.LEARNING_RATE,
            schedule=CosineConfig(minimal.WARMUP_STEPS, final_fraction=minimal.FINAL_FRACTION),
            groups=(replace(positions, learning_rate=minimal.POSITIONS_LEARNING_RATE), *others),
            weight_decay=minimal.WEIGHT_DECAY,
            clip_norm=minimal.CLIP_NORM,
            b1=minimal.B1,
            b2=minimal.B2,
            eps=minimal.EPS,
        ),
        training=TrainingConfig(
            steps=minimal.STEPS,
            log_every=minimal.LOG_EVERY,
            eval_every=minimal.EVAL_EVERY,
            eval_batch_size=minimal.EVAL_BATCH_SIZE,
            eval_windows=minimal.EVAL_ROWS,
            checkpoint_every=minimal.CHECKPOINT_EVERY,
        ),
        logging=LoggingConfig(sample_prompt=minimal.PROMPT, sample_tokens=minimal.SAMPLE_TOKENS),
    )


def newest(workdir: Path) -> dict:
    """The state of the newest checkpoint, in NumPy arrays."""
    step = max(int(path.name) for path in workdir.iterdir() if path.name.isdigit())
    folder, reader = workdir / str(step) / "default", ocp.PyTreeCheckpointer()
    shapes = reader.metadata(folder).item_metadata.tree
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    return reader.restore(folder, restore_args=as_arrays)


def command(changes: dict, workdir: Path, steps: int) -> list[str]:
    return [sys.executable, "-c", CHANGED, str(PROGRAM), json.dumps(changes), str(workdir), str(steps)]


def test_one_can_hold_it():
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) <= 200


def test_its_settings_are_those_of_quickstart():
    assert experiment_of(program()) == hyena_jax.load_config("quickstart")


@pytest.mark.wide
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(MIXED, id="mixed", marks=pytest.mark.grid),
        pytest.param(QUICK, id="quickstart", marks=pytest.mark.grid),
    ],
)
def test_it_trains_as_the_package_does(changes, tmp_path, capsys):
    """Losses and parameters have the same bits; the sample is the package's own."""
    minimal = program(**changes, STEPS=20)
    found = minimal.train(tmp_path / "minimal", minimal.STEPS)
    output = capsys.readouterr().out
    experiment = replace(experiment_of(minimal), logging=LoggingConfig(tensorboard=False))
    run = hyena_jax.train(experiment, tmp_path / "package", quiet=True)
    rows = map(json.loads, (tmp_path / "package" / "metrics.jsonl").read_text().splitlines())
    values = {(row["step"], name): value for row in rows for name, value in row.items()}
    assert found == {step: values[step, "train/loss"] for step in range(1, 21)}
    jax.tree.map(np.testing.assert_array_equal, newest(tmp_path / "minimal")["params"], run.params)
    held_out = float(re.search(r"step   20  held-out loss (\S+)\n", output)[1])
    assert held_out == pytest.approx(values[20, "validation/loss"], abs=1e-4)
    assert output.endswith(f"{minimal.PROMPT}{run.generate(minimal.PROMPT, minimal.SAMPLE_TOKENS)[0]}\n")


@pytest.mark.faults
def test_a_killed_run_continues_to_the_same_bits(tmp_path, capsys):
    minimal = program(**SMALL, CHECKPOINT_EVERY=3)
    whole = minimal.train(tmp_path / "whole", 10)
    sample = capsys.readouterr().out.splitlines()[-1]
    batches = minimal.data.batches

    def killed(*arguments):
        for t, batch in batches(*arguments):
            if t == 8:
                raise KeyboardInterrupt
            yield t, batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal.data, "batches", killed)
        with pytest.raises(KeyboardInterrupt):
            minimal.train(tmp_path / "killed", 10)
    assert minimal.train(tmp_path / "killed", 10) == {step: whole[step] for step in range(7, 11)}
    output = capsys.readouterr().out
    assert "continuing after step 6\n" in output
    assert output.splitlines()[-1] == sample
    jax.tree.map(np.testing.assert_array_equal, *map(newest, (tmp_path / "whole", tmp_path / "killed")))
    assert minimal.train(tmp_path / "killed", 10) == {}
    assert capsys.readouterr().out.splitlines()[-1] == sample


@pytest.mark.grid
@pytest.mark.faults
def test_sigkill_loses_only_the_steps_since_the_last_checkpoint(tmp_path):
    """Kills at random moments, in saves too, since every step is saved."""
    changes, draw = {**SMALL, "CHECKPOINT_EVERY": 1}, random.Random(0)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    end = subprocess.run(command(changes, whole, 60), capture_output=True, check=True).stdout.splitlines()
    for _ in range(3):
        process = subprocess.Popen(command(changes, killed, 60), stdout=subprocess.PIPE)
        n_lines = 4  # of the text, maybe of the checkpoint, and of steps
        assert all(process.stdout.readline() for _ in range(n_lines))
        time.sleep(draw.uniform(0, 0.5))
        process.kill()
        process.communicate()
    again = subprocess.run(command(changes, killed, 60), capture_output=True, check=True).stdout
    assert b"continuing after step" in again
    losses = [b" ".join(line.split()[:4]) for line in again.splitlines() if line.startswith(b"step")]
    assert losses == [b" ".join(line.split()[:4]) for line in end if line.startswith(b"step")][-len(losses) :]
    assert again.splitlines()[-1] == end[-1]
    jax.tree.map(np.testing.assert_array_equal, newest(whole), newest(killed))
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.grid
def test_the_command(tmp_path):
    """As a reader runs it, on two devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(PROGRAM), "--workdir", str(tmp_path / "run"), "--steps", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "701,760 parameters; 2 x cpu\n" in done.stdout
    assert re.search(r"\nstep    2  loss \d\.\d{4}  \d+ ms per step\n", done.stdout)
    assert len(done.stdout.partition("\ndef ")[2]) > 250
