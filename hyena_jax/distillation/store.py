"""Writes the new run folder: a run at step 0 with the distilled parameters."""

from pathlib import Path

import jax

from hyena_jax.distillation.sizes import Source, Tried
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.evaluate import measured_on
from hyena_jax.training.folder import CHECKPOINTS, write_description
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_state

CONFIG_FILE = "config.py"
CONFIG = '''"""This folder's experiment; to continue: hyena-jax train THIS_FILE --workdir THIS_FOLDER."""

from pathlib import Path

from hyena_jax import config


def get_config():
    return config.read(Path(__file__).with_name("config.json"))
'''


def write_run(folder: Path, source: Source, distilled: Tried) -> None:
    """Writes config, data.json and a checkpoint at step 0 with a new optimizer state."""
    experiment, params = distilled.experiment, distilled.params
    write_description(folder, experiment, source.about_data)
    (folder / CONFIG_FILE).write_text(CONFIG, encoding="utf-8")
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    state = jax.device_get(init_state(params, optimizer))
    with Checkpoints(folder / CHECKPOINTS, experiment.training.keep_checkpoints, print) as checkpoints:
        meta = Meta(0, distilled.values["loss"], measured_on(source.data))
        checkpoints.save(meta, state.to_items())
