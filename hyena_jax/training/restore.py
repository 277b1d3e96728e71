"""The state that a run begins with: of its newest checkpoint, or of step 0."""

from pathlib import Path

import jax

from hyena_jax import config
from hyena_jax.parallel.processes import on_first
from hyena_jax.system.errors import require
from hyena_jax.training import lora
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.folder import BASE, DESCRIPTION, RunFolder, require_checkpoint_if_logged
from hyena_jax.training.initial import require_finite, require_same_base, write_base
from hyena_jax.training.setup import Setup
from hyena_jax.training.step import TrainState, all_finite, init_params, init_state


def restore_or_start(
    setup: Setup, workdir: Path, run: RunFolder | None, source: str, checkpoints: Checkpoints
) -> tuple[TrainState, Meta | None]:
    """The placed state of the newest checkpoint, or of step 0, and the meta of that checkpoint.

    A run that starts from given parameters, which came from `source`, keeps them in its folder. `run` is what
    `folder.hold` found in `workdir`. All processes must call this.
    """
    strategy = setup.strategy
    shapes = jax.eval_shape(lambda: _draw(setup))
    restored = checkpoints.restore(strategy.restore_target(shapes).to_items())
    if restored is None:
        on_first(lambda: require_checkpoint_if_logged(workdir, run))
        on_first(lambda: _keep(workdir, setup, source))
        return initial_state(setup), None
    state = strategy.from_global(TrainState.from_items(restored.items))
    if lora.lora_of(setup.experiment.model) is not None:
        require_same_base(f"checkpoint {restored.step}", restored.meta, setup.initial_sha256)
        state = state._replace(base=strategy.place(setup.initial))
    found = int(state.step)
    require(found == restored.step, f"step in checkpoint {restored.step}", found, "the step of its folder")
    if not all_finite(state.params):
        require_finite(strategy.host_copy(state.params), f"checkpoint {restored.step}")
    return state, restored.meta


def initial_state(setup: Setup) -> TrainState:
    """The placed state of step 0."""
    state = setup.strategy.make_state(lambda: _draw(setup))
    if setup.initial is None:
        return state
    given = "params" if lora.lora_of(setup.experiment.model) is None else "base"
    return state._replace(**{given: setup.strategy.place(setup.initial)})


def _draw(setup: Setup) -> TrainState:
    """The state of step 0 before it is placed, without given parameters."""
    adaptation, seed = lora.lora_of(setup.experiment.model), setup.experiment.seed
    if adaptation is None:
        return init_state(init_params(setup.model, seed), setup.optimizer)
    shapes = jax.eval_shape(lambda: setup.initial)
    return init_state(lora.init_factors(adaptation, shapes, seed), setup.optimizer)


def _keep(workdir: Path, setup: Setup, source: str) -> None:
    """Writes the parameters that a run starts from, unless they are drawn or already there."""
    if setup.initial is None:  # what is there is of another start, which was killed before there was a run
        for name in (BASE, DESCRIPTION):
            (workdir / name).unlink(missing_ok=True)
    elif not (config.is_run(workdir) and (workdir / BASE).exists()):
        write_base(workdir, setup.initial, setup.initial_sha256, source)
