"""A run as a model of EleutherAI's Language Model Evaluation Harness (lm-eval), which brings the tasks.

Requests are tokenised, truncated, windowed and ended as the harness's class for transformers does it with the
run's export, so that both get the same figures.

Shapes: B rows of a batch, L tokens of a row.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hyena_jax import parallel
from hyena_jax.config import ParallelConfig
from hyena_jax.config.plugins import OF_PATHS
from hyena_jax.data.tokenizers import decode_after
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.interop.transformers_folder import end_of
from hyena_jax.scoring.windows import padded
from hyena_jax.system.errors import UserError, choose, describe_fault, require
from hyena_jax.system.output import bar
from hyena_jax.training.loss import cross_entropy, scored

if TYPE_CHECKING:
    from hyena_jax.api import LoadedRun

OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p")
"""A task's `generation_kwargs` that are known; any other is refused."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0}
"""Options of which only this value is known."""

Pair = tuple[Any, list[int], list[int]]
"""A request (for the harness), the ids of its context, and those that are scored."""


def evaluate(
    run: "LoadedRun",
    tasks: Sequence[str],
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 16,
) -> dict[str, Any]:
    """The harness's results of a run: `results`, `versions`, `n-samples` and more, as JSON values.

    Args:
      tasks: names of tasks, groups or tags, or folders of YAML tasks, of which all are taken.
      limit: documents of each task; None: all.
      num_fewshot: examples before each document; None: the task's own number.
      batch_size: rows at once.
    """
    folders = [name for name in tasks if name and os.path.isdir(name)]
    names = [name for name in tasks if name not in folders]
    model = HarnessModel(run, batch_size)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings repeat defaults of each metric
    try:
        # The index of the harness's own tasks, thousands of files, is read only where one is named.
        manager = TaskManager(include_path=folders or None, include_defaults=bool(names))
        own = TaskManager(include_path=folders, include_defaults=False).all_subtasks if folders else []
        for name in names:
            choose("tasks", name, dict.fromkeys(manager.all_tasks))
        require(len(own) > 0 or not folders, "tasks", folders, "folders with tasks in YAML")
        found = simple_evaluate(
            model,
            tasks=[*names, *own],
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (UserError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a task is YAML, templates and functions, which raise anything
        is_machines = isinstance(error, OSError) and not isinstance(error, OF_PATHS)
        if is_machines or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)):
            raise
        raise UserError(f"cannot be run by the harness: {describe_fault(error)}", "tasks") from error
    return {key: found[key] for key in ("results", "versions", "n-samples", "n-shot", "higher_is_better")}


class HarnessModel(TemplateLM):
    """What the harness asks of a model: likelihoods of texts, maybe after a context, and continuations."""

    def __init__(self, run: "LoadedRun", batch_size: int = 16):
        super().__init__()
        self.run, self.batch_size, self.tokenizer_ = run, batch_size, run.tokenizer
        self.max_length = run.model.config.max_len
        self.end = end_of(run.model.config, self.tokenizer_.bos)
        strategy = parallel.make_strategy(ParallelConfig())
        self.row_shards, self.place_batch = strategy.row_shards, strategy.place_batch
        self.step, self.params = strategy.map_eval_step(self._score), strategy.place(run.params)

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context: the start token, else the end's, a new line, or id 0."""
        known = self.end if self.tokenizer_.bos is None else self.tokenizer_.bos
        if known is not None:
            return known
        try:
            return int(self.tokenizer_.encode("\n")[0])
        except (UserError, IndexError):
            return 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The ids of a text, after the start token if there is one, unless `add_special_tokens` is False."""
        bos = [] if self.tokenizer_.bos is None or add_special_tokens is False else [self.tokenizer_.bos]
        return [*bos, *self.tokenizer_.encode(string).tolist()]

    def _score(self, params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Log-probabilities of the targets, and whether they are the most probable ids, float32 [B, L].

        Ids that only pad the model's vocabulary have probabilities here, as in the harness's own classes.
        """

        def score(logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
            is_greedy = logits.argmax(axis=-1) == targets
            return {"log_probs": -cross_entropy(logits, targets), "greedy": is_greedy.astype(jnp.float32)}

        return scored(score, self.run.model, params, batch)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would give it."""
        rows = [
            (([*context, *continuation])[-(self.max_length + 1) :], len(continuation))
            for _, context, continuation in requests
        ]
        n_rows = -(-self.batch_size // self.row_shards) * self.row_shards
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        with bar("scoring", len(rows)) as advance:
            for first in range(0, len(rows), n_rows):
                some = longest_first[first : first + n_rows]
                length = padded(len(rows[some[0]][0]) - 1, self.max_length)
                batch = np.zeros((2, n_rows, length), np.int32)
                for of_row, i in enumerate(some):
                    ids = rows[i][0]
                    batch[0, of_row, : len(ids) - 1], batch[1, of_row, : len(ids) - 1] = ids[:-1], ids[1:]
                values = self.step(self.params, self.place_batch({"inputs": batch[0], "targets": batch[1]}))
                log_probs, greedy = (
                    np.asarray(values[name], np.float64).reshape(n_rows, length)
                    for name in ("log_probs", "greedy")
                )
                for of_row, i in enumerate(some):
                    ids, n_scored = rows[i]
                    last = slice(max(0, len(ids) - 1 - n_scored), len(ids) - 1)
                    found[i] = math.fsum(log_probs[of_row, last]), bool(greedy[of_row, last].all())
                advance(len(some))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, read in windows that do not overlap."""
        pairs, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for window in windows:
                pairs.append((None, *make_disjoint_window(window)))
                owners.append(i)
        found = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            found[owner] += log_likelihood
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to one of the texts at which its task stops, or the token of the end.

        Equal requests are samples of one context, with the seeds 0, 1 and so on.
        """
        found, groups, repeats = [""] * len(requests), {}, Counter()
        for i, request in enumerate(requests):
            context, options = request.args[0], repr(sorted(request.args[1].items()))
            groups.setdefault((options, repeats[context, options]), []).append(i)
            repeats[context, options] += 1
        with bar("generating", len(requests)) as advance:
            for (_, seed), group in groups.items():
                options = normalize_gen_kwargs(requests[group[0]].args[1], default_max_gen_toks=256)
                group = sorted(group, key=lambda i: -len(requests[i].args[0]))
                for first in range(0, len(group), self.batch_size):
                    some = group[first : first + self.batch_size]
                    texts = self._continued([requests[i].args[0] for i in some], options, seed)
                    for i, text in zip(some, texts, strict=True):
                        found[i] = text
                    advance(len(some))
        return found

    def _continued(self, contexts: Sequence[str], options: dict[str, Any], seed: int) -> list[str]:
        for name in options.keys() - OPTIONS:
            is_neutral = name in NEUTRAL and options[name] == NEUTRAL[name]
            allowed = f"{NEUTRAL[name]}" if name in NEUTRAL else f"left out; known are {', '.join(OPTIONS)}"
            require(is_neutral, f"{name} of the task's generation_kwargs", options[name], allowed)
        n_new, until = options["max_gen_toks"], [text for text in options["until"] if text]
        room = self.max_length - n_new
        require(room > 0, "max_gen_toks of the task", n_new, f"below the model's max_len={self.max_length}")
        rule = SamplingRule(greedy=True)
        if options["do_sample"]:
            restrictions = (options.get(name) for name in ("top_k", "top_p", "min_p"))
            rule = SamplingRule(False, options.get("temperature", 1.0), *restrictions)
        prompts = [np.array(self.tok_encode(context)[-room:], np.int32) for context in contexts]
        request = self.run.request(n_new, rule, [text for text in until if self._can_spell(text)], seed)
        if self.end is not None:
            request = replace(request, stop_tokens=(*request.stop_tokens, self.end))
        texts = []
        for prompt, row in zip(prompts, self.run.continuations(prompts, request), strict=True):
            tokens = row.tokens[:-1] if self.end in row.tokens[-1:] else row.tokens
            text = decode_after(self.tokenizer_, prompt, tokens)
            for stop in until:
                text = text.partition(stop)[0]
            texts.append(text)
        return texts

    def _can_spell(self, text: str) -> bool:
        """Whether the tokenizer has the symbols of a text; else the model can never write it."""
        try:
            return len(self.tokenizer_.encode(text)) > 0
        except UserError:
            return False
