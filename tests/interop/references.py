"""What the tests here share."""

from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from hyena_jax import models
from hyena_jax.interop.convert import FORMATS
from hyena_jax.interop.family import Options, Source
from hyena_jax.interop.tensors import read_tensors

STORED = Path(__file__).parent / "stored"


def expected(family: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens [1, L] and the reference's logits at the last of them, [1, n, V], at two lengths."""
    with np.load(STORED / family / "expected.npz") as file:
        lengths = sorted(int(name.removeprefix("logits_")) for name in file.files if name != "tokens")
        return [(file["tokens"][:, :length], file[f"logits_{length}"]) for length in lengths]


def source_of(family: str, folder: Path | None = None, **options) -> Source:
    """What `convert` reads of the stored model, or of another folder of its family."""
    folder = folder or STORED / family
    return FORMATS[family.removesuffix("_transformers")](folder, read_tensors(folder), Options(**options))


def params_of(source: Source) -> dict:
    """The parameters that `convert` would write."""
    found = {}
    for path, transform in source.table.transforms.items():
        found[path] = np.float32(transform.read(*(source.tensors[name].read() for name in transform.names)))
    return unflatten_dict(found, sep="/")


def logits_of_source(source: Source, tokens) -> np.ndarray:
    return logits_of(models.build(source.model), params_of(source), tokens)


def logits_of(model, params, tokens) -> np.ndarray:
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))
