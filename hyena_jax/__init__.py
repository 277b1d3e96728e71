"""Sub-quadratic sequence models in JAX.

For scripts and notebooks: `train`, `load_run`, `load_config`, `register`, `Request`, `SamplingRule`, and the
classes and constants of `hyena_jax.config`. Nothing is imported before it is used, in particular not JAX.
"""

import importlib
import sys

__version__ = "0.1.0"

_PLACES = {
    "Likelihood": "hyena_jax.scoring.score:Likelihood",
    "LoadedRun": "hyena_jax.api:LoadedRun",
    "Request": "hyena_jax.generation.decoding:Request",
    "SamplingRule": "hyena_jax.generation.sampling:SamplingRule",
    "UserError": "hyena_jax.system.errors:UserError",
    "compare": "hyena_jax.sweeps.compare:compare",
    "load_config": "hyena_jax.config:load",
    "load_run": "hyena_jax.api:load_run",
    "make_runs": "hyena_jax.sweeps.grid:make_runs",
    "register": "hyena_jax.config:register",
    "sweep": "hyena_jax.sweeps.sweep:sweep",
    "train": "hyena_jax.api:train",
}


_MOVED = {
    "comparison": "sweeps",
    "distillation.measure": "distillation.model",
    "filters.lookup": "filters.implicit",
    "filters.siren": "filters.implicit",
    "filters.stu": "filters.spectral",
    "filters.window": "filters.long_filter",
    "generation.recomputation": "generation.programs",
    "inspect.example": "inspect.content",
    "inspect.long_filters": "inspect.mixers",
    "inspect.matrices": "inspect.mixers",
    "inspect.memory": "inspect.mixers",
    "inspect.reach": "inspect.mixers",
    "inspect.subject": "inspect.content",
    "interop.card": "cli.export",
    "interop.settings": "interop.family",
    "layout": "ops.forms",
    "mixers.annotated_hyena": "mixers.hyena",
    "mixers.dense": "mixers.layers",
    "mixers.gated_delta2": "mixers.gated_delta",
    "mixers.gated_hyena": "mixers.hyena",
    "mixers.h3": "mixers.convolution",
    "mixers.kda": "mixers.gated_delta",
    "mixers.mamba2": "mixers.mamba",
    "mixers.mamba3": "mixers.mamba",
    "mixers.norms": "mixers.layers",
    "mixers.plain_convolution": "mixers.convolution",
    "mixers.token_shift": "models.blocks",
    "models.norms": "mixers.layers",
    "ops.fast.broadcasting": "ops.fast.derivatives",
    "ops.layout": "ops.forms",
    "parallel.replicas": "parallel.processes",
    "reference.fastmax": "reference.attention",
    "reference.language_models": "reference.models",
    "reference.mamba3": "reference.delta_rule",
    "reference.rwkv7": "reference.delta_rule",
    "training.goodput": "training.timing",
    "training.local_steps": "training.checkpoint_files",
    "training.restore": "training.run",
    **{name: f"ops.{name}" for name in ("counts", "initializers")},
    **{
        name: f"system.{name}"
        for name in ("chips", "errors", "files", "output", "signals", "startup", "storage", "trees")
    },
}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _public()
    if name in _PLACES:
        module, _, attribute = _PLACES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name[0].isupper() and name in _of_config():
        return _of_config()[name]
    _Moved.find_spec(f"{__name__}.{name}")
    raise AttributeError(f"module 'hyena_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})


def _public() -> list[str]:
    return sorted({*_PLACES, *_of_config()})


def _of_config() -> dict[str, object]:
    """The classes and constants of `hyena_jax.config`: all names that start with a capital letter."""
    names = vars(importlib.import_module("hyena_jax.config"))
    return {name: value for name, value in names.items() if name[0].isupper()}


class _Moved:
    """Asked for a module that nothing else found: names the new place of one that moved."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == __name__ and module in _MOVED:
            raise ModuleNotFoundError(f"{name} is {package}.{_MOVED[module]} now", name=name)


sys.meta_path.append(_Moved)
