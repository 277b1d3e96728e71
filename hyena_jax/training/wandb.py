"""Weights & Biases as a tracker, with the extra `wandb`."""

import secrets
from collections.abc import Mapping

from hyena_jax.config import WandbConfig, encode
from hyena_jax.system import files
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import read_bytes
from hyena_jax.training.trackers import Start, Tracker

try:
    import wandb
except ImportError:
    message = "tracker 'wandb' needs the package wandb: pip install 'hyena_jax[wandb]'"
    raise UserError(message) from None

RUN_ID, LONGEST = "wandb_id.txt", 128


class WandbTracker(Tracker):
    """A run of Weights & Biases that all starts of our run continue.

    Its id is kept in the run folder, next to the folder `wandb` of what is not uploaded yet. W&B cannot drop
    rows: of a step that is repeated, it keeps the first row.
    """

    def __init__(self, config: WandbConfig, start: Start):
        """Starts or continues the run, which has the folder's name, and the experiment as its config."""
        path = start.workdir / RUN_ID
        if path.exists():
            run_id = read_bytes("W&B's run id", path, LONGEST).decode().strip()
        else:
            run_id = secrets.token_hex(4)
            files.write_text(path, run_id + "\n")
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            mode=config.mode,
            id=run_id,
            resume="allow",  # a run of this id continues, or is made
            name=start.workdir.resolve().name,
            dir=start.workdir,
            config=encode(start.experiment),
            reinit="create_new",  # a notebook may have its own run
            settings=wandb.Settings(console="off", quiet=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
