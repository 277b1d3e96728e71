"""Commands as functions, for scripts and notebooks: `hyena_jax.train` and `hyena_jax.load_run`."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import optax

from hyena_jax import config, models
from hyena_jax.config import DataConfig, Experiment
from hyena_jax.data.dataset import Dataset
from hyena_jax.data.tokenizers import Tokenizer, decode_after, is_tokenizer
from hyena_jax.generation import decoding
from hyena_jax.generation.decoding import Continuation, Request
from hyena_jax.generation.programs import note_recomputation
from hyena_jax.generation.prompts import OnFull, encode, stops
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.scoring.score import Likelihood, Pool, Scoring, plan_scoring
from hyena_jax.system.errors import as_printed, require
from hyena_jax.system.files import METRICS
from hyena_jax.system.output import Output, bar, watched
from hyena_jax.system.startup import refuse_wrong_jaxlib
from hyena_jax.system.storage.mirror import opened
from hyena_jax.training import metrics
from hyena_jax.training import run as training
from hyena_jax.training.evaluate import evaluate_run, load_data
from hyena_jax.training.folder import RunFolder, read_folder
from hyena_jax.training.initial import load_params
from hyena_jax.training.options import StartOptions

Prompt = str | Sequence[int] | np.ndarray
"""Text, if the data have a tokenizer, or token ids."""


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run: its experiment, and its model with the parameters of one checkpoint."""

    workdir: Path
    """Of a run in a bucket, a local copy of its small files."""
    step: int
    """The step of the checkpoint."""
    model: nn.Module = field(repr=False)
    """`model.apply({"params": params}, inputs)` gives logits."""
    params: optax.Params = field(repr=False)
    """NumPy arrays."""
    folder: RunFolder = field(repr=False)
    """Contents of the run folder."""
    note: Callable[[str], None] = field(repr=False)
    """Prints a note for the user."""

    @property
    def experiment(self) -> Experiment:
        """The run's experiment, with sizes that the model takes from the data filled in."""
        return self.folder.experiment

    @cached_property
    def data(self) -> Dataset:
        """The data of the run, read on first access; see `load_data` for errors."""
        return load_data(self.folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises UserError if its data have none."""
        must = "a run on text, or on data with a tokenizer"
        require(self._has_tokenizer, "workdir", str(self.workdir), must)
        return self.folder.encoding

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`: `step`, `time` (seconds since 1970), and values such as `train/loss`.

        Values that were not finite are None.
        """
        return metrics.read_rows(self.workdir / METRICS)

    def evaluate(
        self,
        path: str | Path | None = None,
        batch_size: int = 64,
        *,
        data: DataConfig | None = None,
        progress: bool = False,
    ) -> dict[str, float]:
        """Metrics on all held-out data of the run, or on all of the data at `path`.

        Args:
          batch_size: rows at once; does not change the result.
          data: settings of the data to evaluate on instead, such as
            `dataclasses.replace(run.experiment.data, test_seq_len=256)` of a task.
          progress: show a bar with the time left if the standard error is a terminal.

        Raises:
          UserError: if the data cannot be read, do not fit the model, or have changed since the run.
        """
        path = None if path is None else str(path)
        watch = partial(watched, "evaluating") if progress else None
        require(path is None or data is None, "path", path, "None together with data")
        return evaluate_run(self.folder, self.model, self.params, path, batch_size, watch, data)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        max_new_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        greedy: bool = False,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        num_samples: int = 1,
        on_full: OnFull = "slide",
    ) -> list[str]:
        """The continuations of one prompt or several: `num_samples` texts for the first, then the next.

        The options are as in `hyena-jax generate`: see `SamplingRule` and `Request`. A continuation ends
        after any of the texts in `stop`, whichever tokens spell it.

        Raises:
          UserError: if an option is out of range, a prompt or a stop cannot be encoded, or the run's data
            have no tokenizer.
        """
        rule = SamplingRule(greedy, temperature, top_k, top_p, min_p)
        request = self.request(max_new_tokens, rule, stop, seed, num_samples, on_full)
        ids = self._encoded(prompts)
        starts = [row for row in ids for _ in range(num_samples)]
        rows = self.continuations(ids, request)
        return [
            decode_after(self.tokenizer, start, row.tokens) for start, row in zip(starts, rows, strict=True)
        ]

    def request(
        self,
        max_new_tokens: int,
        rule: SamplingRule,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        num_samples: int = 1,
        on_full: OnFull = "slide",
    ) -> Request:
        """The request that `generate` makes: with texts to stop at, and only the tokenizer's ids to draw.

        Raises:
          UserError: if a text cannot be encoded, or the run's data have no tokenizer.
        """
        stop_tokens, stop_texts = stops(self.tokenizer, [stop] if isinstance(stop, str) else stop)
        return Request(
            n_tokens=max_new_tokens,
            rule=rule,
            seed=seed,
            n_samples=num_samples,
            stop_tokens=stop_tokens,
            stop_texts=stop_texts,
            n_symbols=self.tokenizer.vocab_size,
            on_full=on_full,
        )

    def continuations(self, prompts: str | Sequence[Prompt], request: Request) -> list[Continuation]:
        """The tokens that follow the prompts, and their log-probabilities.

        Ids beyond the tokenizer's vocabulary are never drawn, unless `request.n_symbols` is given.

        Raises:
          UserError: see `generate`, and `hyena_jax.generation.decoding.generate`.
        """
        require(request.n_tokens >= 1, "max_new_tokens", request.n_tokens, "at least 1")
        if request.n_symbols is None and self._has_tokenizer:
            request = replace(request, n_symbols=self.tokenizer.vocab_size)
        ids = self._encoded(prompts)
        return decoding.continuations(decoding.generate(self.decoder, self.params, ids, request))

    def _encoded(self, prompts: str | Sequence[Prompt]) -> list[np.ndarray]:
        return [
            encode(self.tokenizer, prompt, "prompt", at_start=True)
            if isinstance(prompt, str)
            else np.asarray(prompt)
            for prompt in ([prompts] if isinstance(prompts, str) else prompts)
        ]

    def score(
        self,
        texts: str | Sequence[Prompt],
        *,
        prefix: Prompt = "",
        stride: int | None = None,
        batch_size: int = 16,
        progress: bool = False,
    ) -> list[Likelihood]:
        """The log-likelihood of one text or several, as `hyena-jax score` computes it.

        Args:
          prefix: context before every text, which is not scored. Without it, and without a start token of the
            tokenizer, nothing precedes the first token of a text, and it is not scored either.
          stride: new tokens that each window after the first scores, in texts beyond the model's max_len;
            None: half of max_len. See `hyena_jax.scoring.windows`.
          batch_size: windows of max_len tokens at once, or as many tokens in shorter ones.
          progress: show a bar with the time left if the standard error is a terminal.

        Raises:
          UserError: if a text cannot be encoded, an argument is out of range, or the run's data have no
            tokenizer.
        """
        given = [texts] if isinstance(texts, str) else texts
        names = [f"texts[{i}]" for i in range(len(given))]
        scoring = self.scoring(given, names, prefix, stride, batch_size)
        n_windows = scoring.plan.n_windows(range(len(given)))
        with bar("scoring", n_windows) if progress else nullcontext(lambda n: None) as advance:
            return [likelihood for block in scoring.likelihoods(0, advance) for likelihood in block]

    def scoring(
        self,
        texts: Sequence[Prompt],
        names: Sequence[str],
        prefix: Prompt = "",
        stride: int | None = None,
        batch_size: int = 16,
    ) -> Scoring:
        """The texts, checked, and how the model will read them: see `score`, and `names` for errors."""
        options = prefix, stride, batch_size
        return plan_scoring(self.model, self.params, self.tokenizer, texts, names, *options)

    def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        layer: int | None = None,
        pool: Pool = "mean",
        prefix: Prompt = "",
        stride: int | None = None,
        batch_size: int = 16,
        progress: bool = False,
    ) -> np.ndarray | list[np.ndarray]:
        """Vectors of one text or several: the model's hidden states, as `hyena-jax embed` computes them.

        Args:
          layer: block after which the states are taken, 0 for the embedding; None: what the head reads.
          pool: `mean` or `last` of a text's tokens; `none` for all of them.
          prefix: context before every text, which gets no vectors.
          stride: new tokens of each window after the first, in texts beyond the model's max_len; None: half
            of max_len. See `hyena_jax.scoring.windows`.
          batch_size: windows of max_len tokens at once, or as many tokens in shorter ones.
          progress: show a bar with the time left if the standard error is a terminal.

        Returns:
          float32 [n, d_model] of n texts; with pool `none` a list of arrays [tokens, d_model].

        Raises:
          UserError: if a text cannot be encoded or is empty, an argument is out of range, or the run's data
            have no tokenizer.
        """
        given = [texts] if isinstance(texts, str) else texts
        names = [f"texts[{i}]" for i in range(len(given))]
        embedding = self.scoring(given, names, prefix, stride, batch_size).embedding(names, layer, pool)
        n_windows = embedding.scoring.plan.n_windows(range(len(given)))
        with bar("embedding", n_windows) if progress else nullcontext(lambda n: None) as advance:
            rows = list(embedding.vectors(advance))
        if pool == "none":
            return rows
        return np.concatenate([np.empty((0, self.model.config.d_model), np.float32), *rows])

    @property
    def _has_tokenizer(self) -> bool:
        return is_tokenizer(self.folder.encoding)

    @cached_property
    def decoder(self) -> nn.Module:
        """The model, as `generate` takes it. Notes once if the model recomputes its context."""
        note_recomputation(self.model, self.note)
        return self.model


def train(
    experiment: Experiment | None,
    workdir: str | Path,
    *,
    quiet: bool = False,
    **options: Any,
) -> LoadedRun:
    """The trained run in `workdir`, at its newest checkpoint; starts or resumes it as `hyena-jax train` does.

    Args:
      experiment: None takes the experiment of the run in `workdir`, as `hyena-jax train --resume` does.
      workdir: the run's folder, or gs://BUCKET/NAME.
      quiet: print neither progress nor notes.
      options: any of the fields of `StartOptions`: `profile`, `profile_at`, `profile_every`, `init_from`,
        `accept_changed_data`, `accept_changed_optimizer`. Paths may be text.

    Raises:
      UserError: if the experiment or the folder is wrong, before anything is written; or if the training data
        end, after saving the run.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: on Ctrl-C, SIGTERM or SIGHUP once a step was trained, after saving the run, which the same
        call continues; before that, signals act as usual.

    >>> from dataclasses import replace
    >>> experiment = hyena_jax.load_config("tasks:recall")
    >>> experiment = replace(experiment, training=hyena_jax.TrainingConfig(steps=2))
    >>> run = hyena_jax.train(experiment, "runs/recall", quiet=True)
    >>> run.step
    2
    """
    refuse_wrong_jaxlib()
    if experiment is None:
        experiment = config.read_run(opened(workdir), keep_trackers=True)
    kind = type(experiment).__name__
    require(isinstance(experiment, Experiment), "experiment", kind, "an Experiment; load_config gives one")
    if options.get("profile") is not None:
        options["profile"] = Path(options["profile"])
    if options.get("init_from") is not None:
        options["init_from"] = opened(options["init_from"], "init_from")
    if isinstance(options.get("profile_at"), list):
        options["profile_at"] = tuple(options["profile_at"])
    training.train(experiment, opened(workdir), Output(quiet=quiet), StartOptions(**options))
    return load_run(workdir, quiet=quiet)


_given = inspect.signature(train)
train.__signature__ = _given.replace(  # for help() and editors: the options by their names
    parameters=[
        *(known for known in _given.parameters.values() if known.name != "options"),
        *(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for option in fields(StartOptions)
        ),
    ]
)


def load_run(workdir: str | Path, step: str | int = "latest", *, quiet: bool = False) -> LoadedRun:
    """The run in a folder, with the parameters of one of its checkpoints.

    Args:
      workdir: the run's folder, or gs://BUCKET/NAME.
      step: `latest`, `best` (lowest validation loss), or the number of a saved step.
      quiet: do not print notes, for example on a damaged checkpoint, to the standard error.

    Raises:
      UserError: if workdir holds no run, one of its parts is not registered, or there is no such checkpoint.

    >>> run = hyena_jax.load_run("runs/recall", step="best")
    >>> run.evaluate()["accuracy"] <= 1
    True
    >>> inputs = run.data.held_out_rows(np.arange(4))["inputs"]
    >>> logits = run.model.apply({"params": run.params}, inputs)
    >>> logits.shape == (*inputs.shape, run.experiment.model.vocab_size)
    True
    """

    def note(text: str) -> None:
        if not quiet:
            print(f"hyena-jax: {as_printed(text)}", file=sys.stderr)

    refuse_wrong_jaxlib()
    workdir = opened(workdir)
    folder = read_folder(workdir)
    for change in config.changed_plugins(folder.experiment, folder.plugins):
        note(f"changed since the run was trained: {change}")
    model = models.build(folder.experiment.model)
    number, params = load_params(folder, model, str(step), note)
    return LoadedRun(workdir, number, model, params, folder, note)
