"""Sub-quadratic sequence models in JAX.

For scripts and notebooks: `train`, `load_run`, `load_config`, `register`, `Request`, `SamplingRule`, and the
classes and constants of `hyena_jax.config`. Nothing is imported before it is used, in particular not JAX.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "Likelihood": "hyena_jax.scoring.score:Likelihood",
    "LoadedRun": "hyena_jax.api:LoadedRun",
    "Request": "hyena_jax.generation.decoding:Request",
    "SamplingRule": "hyena_jax.generation.sampling:SamplingRule",
    "compare": "hyena_jax.comparison.compare:compare",
    "load_config": "hyena_jax.config:load",
    "load_run": "hyena_jax.api:load_run",
    "make_runs": "hyena_jax.sweeps.grid:make_runs",
    "register": "hyena_jax.config:register",
    "sweep": "hyena_jax.sweeps.sweep:sweep",
    "train": "hyena_jax.api:train",
}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _public()
    if name in _PLACES:
        module, _, attribute = _PLACES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name[0].isupper() and name in _of_config():
        return _of_config()[name]
    raise AttributeError(f"module 'hyena_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})


def _public() -> list[str]:
    return sorted({*_PLACES, *_of_config()})


def _of_config() -> dict[str, object]:
    """The classes and constants of `hyena_jax.config`: all names that start with a capital letter."""
    names = vars(importlib.import_module("hyena_jax.config"))
    return {name: value for name, value in names.items() if name[0].isupper()}
