import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    LanguageModelConfig,
    LoggingConfig,
    ParallelConfig,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.training.run import train

TEXT = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(99, 0, -1))


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(compiled_once) -> None:
    """Most tests here train."""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """One path for all tests, so that they can continue copies of one run."""
    return tmp_path_factory.mktemp("data") / "text.txt"


@pytest.fixture
def text(text_file) -> Path:
    text_file.write_text(TEXT)
    return text_file


@pytest.fixture(scope="session")
def settings(text_file) -> Experiment:
    """A run of a second: 12 steps, checkpoints at 5 and 10, evaluations at 4, 8 and 12.

    Longer and shorter ones decay at the same steps, and so compile the same program.
    """
    return Experiment(
        model=LanguageModelConfig(
            pattern=(AttentionConfig(2),),  # which traces and compiles fastest
            n_layers=1,
            d_model=8,
            d_ff=8,
            max_len=16,
            dropout=0.1,
        ),
        data=TextConfig(path=str(text_file), seq_len=16, batch_size=4),
        optimizer=AdamWConfig(schedule=CosineConfig(2, decay_steps=12), groups=(NO_DECAY,)),
        training=TrainingConfig(steps=12, eval_every=4, eval_batch_size=8, checkpoint_every=5, log_every=3),
        parallel=ParallelConfig(devices=1),
        logging=LoggingConfig(tensorboard=False),
    )


@pytest.fixture
def experiment(settings, text) -> Experiment:
    """The same, with its text in place."""
    return settings


@pytest.fixture(scope="session")
def trained(settings, text_file, tmp_path_factory) -> Path:
    """The experiment's run, never stopped: to be copied, not changed. What it said is in trained.txt."""
    text_file.write_text(TEXT)
    run = tmp_path_factory.mktemp("runs") / "trained"
    with pytest.MonkeyPatch.context() as patch, run.with_suffix(".txt").open("w") as said:
        patch.setattr("hyena_jax.training.console.ROW_EVERY", 0.0)
        train(settings, run, Console(file=said, width=120))
    return run


@pytest.fixture
def whole(trained, experiment, tmp_path) -> Path:
    """A copy of the run that was never stopped."""
    return shutil.copytree(trained, tmp_path / "whole")


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)
