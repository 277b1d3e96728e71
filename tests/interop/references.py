"""What the tests here share."""

from pathlib import Path

import jax
import numpy as np

STORED = Path(__file__).parent / "stored"


def expected(family: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens [1, L] and the reference's logits at the last of them, [1, n, V], at two lengths."""
    with np.load(STORED / family / "expected.npz") as file:
        lengths = sorted(int(name.removeprefix("logits_")) for name in file.files if name != "tokens")
        return [(file["tokens"][:, :length], file[f"logits_{length}"]) for length in lengths]


def logits_of(model, params, tokens) -> np.ndarray:
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))
