"""The file that one can hold trains as the package does, bit for bit, and continues after a kill."""

import importlib.util
import json
import os
import re
import subprocess
import sys
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
def test_the_command(tmp_path):
    """As a reader runs it, on two devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(PROGRAM), "--workdir", str(tmp_path / "run"), "--steps", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "701,760 parameters; 2 x cpu\n" in done.stdout
    assert re.search(r"\nstep    2  loss \d\.\d{4}  \d+ ms per step\n", done.stdout)
    assert len(done.stdout.partition("\ndef ")[2]) > 250
