"""What a sweep says of its time."""

import io
from pathlib import Path

from hyena_jax.config import Experiment, TrainingConfig
from hyena_jax.sweeps.progress import SweepProgress
from hyena_jax.sweeps.sweep import Outcome
from hyena_jax.system.output import Output


def test_the_planned_time_is_that_of_the_steps_that_are_left_on_all_workers():
    experiment = Experiment(training=TrainingConfig(steps=100))
    done = {"a": 75, "b": 0, "c": 0}
    outcomes = {name: Outcome(Path(name), experiment, step=step, planned=60.0) for name, step in done.items()}
    console = Output(file=io.StringIO(), width=120)
    SweepProgress(console, outcomes, ("a", "b", "c"), 2)
    # 15 and 60 seconds for one worker, 60 for the other.
    assert "3 runs to train; 225 steps; planned time 0:01:15" in console.file.getvalue()
