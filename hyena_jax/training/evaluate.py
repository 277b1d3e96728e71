"""Exact evaluation on held-out text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax.config import UserError, require
from hyena_jax.data import loader
from hyena_jax.data.text import Corpus, load_corpus
from hyena_jax.training import parallel
from hyena_jax.training.metrics import Values, perplexity
from hyena_jax.training.run_folder import Run
from hyena_jax.training.step import make_eval_step


def evaluate(
    eval_step: Callable,
    params: optax.Params,
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    devices: Sequence[jax.Device],
    max_windows: int | None = None,
) -> Values:
    """Loss (nats a token), perplexity, bits per byte, accuracy, mean probability of the true token.

    Every token of the held-out text counts once (or of `max_windows` windows of it). The sums of
    `make_eval_step` over rows are added up without rounding in between, so the result does not depend on how
    rows were batched, beyond the rounding inside a row.
    """
    n_windows = loader.n_eval_batches(len(corpus.held_out), seq_len, 1, max_windows)
    batch_size = parallel.round_up(min(batch_size, n_windows), len(devices))
    batches = loader.eval_batches(corpus.held_out, seq_len, batch_size, max_windows)
    rows: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        sums = eval_step(params, parallel.split_batch(batch, len(devices)))
        for name, values in sums.items():
            rows.setdefault(name, []).append(np.asarray(values, np.float64).ravel())
    total = {name: math.fsum(np.concatenate(values)) for name, values in rows.items()}
    loss = total["nats"] / total["tokens"]
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": loss * len(corpus.held_out) / corpus.held_out_bytes / math.log(2),
        "accuracy": total["correct"] / total["tokens"],
        "probability": total["probability"] / total["tokens"],
    }


def evaluate_run(
    run: Run, model: nn.Module, params: optax.Params, path: str | None, batch_size: int
) -> Values:
    """`evaluate` on the whole held-out text of a run, or on all of the text at `path`; adds `tokens`.

    Raises:
      UserError: if the text cannot be had, or is not the one that the run was held out from.
    """
    require(batch_size >= 1, "batch_size", batch_size, "at least 1")
    data = run.experiment.data
    if path is not None:
        data = replace(data, path=path, validation_path=path)
    corpus = load_corpus(data, run.tokenizer)
    if path is None and corpus.fingerprint != run.fingerprint:
        raise UserError(
            "the text changed since the run was started (its fingerprint differs); name one with --path"
        )
    devices = parallel.local_devices(None)
    eval_step = parallel.map_eval_step(make_eval_step(model), devices)
    values = evaluate(
        eval_step, parallel.replicate(params, devices), corpus, data.seq_len, batch_size, devices
    )
    return {**values, "tokens": len(corpus.held_out) - 1}
