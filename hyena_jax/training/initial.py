"""The parameters that a run starts from: drawn, of a file, of a run's checkpoint, or the base of LoRA.

<workdir>/base.safetensors   given parameters, written once, when the run is started; with LoRA, its base
<workdir>/base.json          their SHA-256, and where they came from
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import config, models
from hyena_jax.config import Experiment
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import read_json
from hyena_jax.system.trees import named_leaves
from hyena_jax.training import export, lora
from hyena_jax.training.checkpoint import Meta, best, restore_readonly, saved_steps
from hyena_jax.training.folder import BASE, CHECKPOINTS, DESCRIPTION, RunFolder, read_folder
from hyena_jax.training.step import init_params

Report = Callable[[str], None]
"""Prints a line for the user."""


def read_initial(
    experiment: Experiment,
    shapes: optax.Params,
    workdir: Path | None,
    init_from: Path | None,
    report: Report,
) -> tuple[optax.Params | None, str | None]:
    """The parameters that a run starts from, with their digest, or None to draw them; with LoRA, the base.

    A run without a checkpoint starts once more from what its folder kept: the source may have changed.
    """
    adapts = lora.lora_of(experiment.model) is not None
    if workdir is not None and config.is_run(workdir):
        differences = config.identity_differences(experiment, config.read_run(workdir))
        # By `check_run`, which may accept another optimizer.
        is_refused = any(not line.startswith("optimizer.") for line in differences)
        if is_refused or (not adapts and saved_steps(workdir / CHECKPOINTS)):
            return None, None
        if adapts or (workdir / BASE).exists():
            return read_base(workdir, shapes, report)
    must = "a run's folder or a file from `export`, the base that model.lora.rank adapts"
    require(init_from is not None or not adapts, "init_from", init_from, must)
    if init_from is None:
        return None, None
    params = read_params(init_from, shapes, report)
    return params, digest(params)


def load_params(run: RunFolder, model: nn.Module, step: str, report: Report) -> tuple[int, optax.Params]:
    """The number of a saved step, and its parameters as NumPy arrays; of a run with LoRA, merged.

    `step` is `latest`, `best`, or a number; UserError if it is not saved, or no checkpoint is usable.
    """
    folder = run.checkpoints
    steps = saved_steps(folder)
    if not steps:
        raise UserError(f"{folder} holds no checkpoint")
    numbers = {str(saved): saved for saved in steps}
    must = f"'latest', 'best' or one of the saved {steps}"
    require(step in ("latest", "best", *numbers), "step", step[:40], must)
    number = {"latest": None, "best": best(folder).step, **numbers}[step]
    if step == "best" and number is None:
        raise UserError(f"must be 'latest' or one of {steps}: none was evaluated, got 'best'", "step")
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    adaptation = lora.lora_of(run.experiment.model)
    saved = shapes
    if adaptation is not None:
        saved = jax.eval_shape(lambda: lora.init_factors(adaptation, shapes, 0))
    target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
    restored = restore_readonly(folder, {"params": target}, report, number)
    params, where = restored.items["params"], str(folder / str(restored.step))
    require_finite(params, where)
    if adaptation is None:
        return restored.step, params
    base, sha256 = read_base(folder.parent, shapes, report)
    require_same_base(where, restored.meta, sha256)
    return restored.step, lora.on_host(run.experiment.model, lora.Adapted(base, params))


def read_params(path: Path, shapes: optax.Params, report: Report) -> optax.Params:
    """The parameters of the newest checkpoint of the run in a folder, or of a file from `export`.

    Raises UserError if they are not those of `shapes`; `report` gets a line for each that differs.
    """
    if not path.is_dir():
        return export.read(path, shapes, report)
    try:
        run = read_folder(path)
        _, params = load_params(run, models.build(run.experiment.model), "latest", report)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", "init_from") from error
    export.require_fit(path, params, shapes, report)
    return params


def read_base(workdir: Path, shapes: optax.Params, report: Report) -> tuple[optax.Params, str]:
    """The parameters that a run's folder keeps, as NumPy arrays, and their digest; refuses changed files."""
    path = workdir / BASE
    about = read_json("base", workdir / DESCRIPTION)
    params = export.read(path, shapes, report, "base")
    found, wanted = digest(params), about.get("sha256") if isinstance(about, dict) else None
    if found != wanted:
        raise UserError(f"base {str(path)!r} is not what was saved: its SHA-256 differs from {DESCRIPTION}")
    return params, found


def write_base(workdir: Path, params: optax.Params, sha256: str, source: str) -> None:
    """Writes the parameters that a run starts from, and next to them their digest."""
    export.write(workdir / BASE, params, {"sha256": sha256, "source": source}, step=0)


def digest(params: optax.Params) -> str:
    """SHA-256 of parameters: their paths, shapes, dtypes and values."""
    found = hashlib.sha256()
    for name, leaf in named_leaves(params).items():
        found.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def require_same_base(checkpoint: str, meta: Meta, sha256: str) -> None:
    """Raises UserError unless the factors of a checkpoint were trained on the base with this digest."""
    allowed = f"the {str(meta.base)[:12]} that {checkpoint} was trained on"
    require(meta.base == sha256, f"SHA-256 of {BASE}", sha256[:12], allowed)


def require_finite(params: optax.Params, source: str) -> None:
    """Raises UserError, with the parameter's name, if an entry of NumPy parameters is not finite."""
    for name, leaf in named_leaves(params).items():
        if not np.isfinite(leaf).all():
            raise UserError(f"{source} cannot be used: parameter {name} is not finite")
