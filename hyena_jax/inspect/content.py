"""What the page about a run holds: the run and its model at work on one input, computed and put in order."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax

from hyena_jax import models
from hyena_jax.config import MIXER_CONFIGS, Experiment, encode, read_stages, stage_changes
from hyena_jax.data.dataset import Encoding
from hyena_jax.data.tokenizers import is_tokenizer
from hyena_jax.inspect import json_values, page
from hyena_jax.inspect.example import Example, piece, probability, scores
from hyena_jax.inspect.tracing import Trace, trace
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import METRICS
from hyena_jax.system.output import bar
from hyena_jax.training import lora, metrics
from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.folder import BASE, RunFolder, read_folder
from hyena_jax.training.initial import load_params, read_base
from hyena_jax.training.step import init_params


def content(
    workdir: Path, step: str, shown: Example, beside: Path | None, note: Callable[[str], None]
) -> page.Content:
    """The content of a run's page.

    Args:
      step: `latest`, `best` or a number.
      beside: folder of a run whose mixing matrices are shown next to this run's; None: plain attention.
      note: prints a note for the user.
    """
    folder = read_folder(workdir)
    experiment = folder.experiment
    model = models.build(experiment.model)
    number, params = load_params(folder, model, step, note)
    start, initial = _start(folder, model, number, note)
    seen = trace(model, params, shown.inputs)
    other = None if beside is None else _beside(beside, folder.encoding, shown, seen, note)
    after, before = [(layer, layer.own(params)) for layer in seen.layers], None
    if initial is not None:
        before = [(layer, layer.own(initial)) for layer in trace(model, initial, shown.inputs).layers]
    with bar("computing", len(after) + 1) as advance:
        mixing = json_values.matrices(seen, params, other, advance)
        filters = json_values.filters(before, after)
        gates = json_values.recurrences(before, after)
        advance()
    rows = metrics.read_rows(workdir / METRICS)
    stages = read_stages(workdir, experiment)
    changes = [(f"from step {step} on", "; ".join(lines)) for step, lines in stage_changes(stages).items()]
    unit = "" if not experiment.loss.in_nats else " (nats per token)" if shown.labels else " (nats)"
    titles = {"loss": f"loss{unit}", "accuracy": "accuracy (share guessed right)"}
    charts = {f"curve-{name}": json_values.curves(rows, name, title) for name, title in titles.items()}
    charts["activations"] = json_values.activations(seen)
    image = None
    if shown.labels:
        found, labels = scores(shown, seen.outputs), shown.labels
        guesses = [_symbol(folder.encoding, token) for token in found.guess]
        body = page.losses(labels, found.nats, guesses, found.probability)
    else:
        image = json_values.image(shown.inputs[0], experiment.model.patch_size)
        labels = tuple(str(i) for i in range(image["grid"][0] * image["grid"][1]))
        classes = probability(seen.outputs)
        classes = classes.mean(1) if classes.ndim == 3 else classes  # one answer for each patch
        body = page.probabilities(classes[0], int(shown.targets[0]))
    return page.Content(
        title=f"{workdir.resolve().name}, step {number}",
        facts=_facts(experiment, rows, params, shown, unit) + changes,
        config=json.dumps(encode(experiment), indent=2),
        body=body,
        thumbnails=[(layer["name"], matrix) for layer, matrix in mixing],
        lengths=[_lengths(layer) for layer in filters],
        start=start,
        data={
            "labels": labels,
            "layers": [layer for layer, _ in mixing],
            "filters": filters,
            "gates": gates,
            "charts": {name: chart for name, chart in charts.items() if chart is not None},
            "image": image,
        },
    )


def _start(
    folder: RunFolder, model: nn.Module, number: int, note: Callable[[str], None]
) -> tuple[str, optax.Params | None]:
    """What a run's training started from, in words and as parameters; nothing at step 0, the start itself."""
    seed = folder.experiment.seed
    if number == 0:
        return "", None
    workdir = folder.checkpoints.parent
    if lora.lora_of(folder.experiment.model) is not None or (workdir / BASE).exists():
        shapes = jax.eval_shape(lambda: init_params(model, seed))
        return "from the parameters that the run was given", read_base(workdir, shapes, note)[0]
    if 0 in saved_steps(folder.checkpoints):  # of a run that was converted or distilled, and then trained on
        return "at step 0", load_params(folder, model, "0", note)[1]
    return "drawn from the run's seed", init_params(model, seed)


def _beside(
    workdir: Path, encoding: Encoding, shown: Example, seen: Trace, note: Callable[[str], None]
) -> json_values.Other:
    """Another run at work on the same input, whose mixers must read as many positions as those of `seen`."""
    folder = read_folder(workdir)
    config = folder.experiment.model
    if folder.encoding != encoding or config.input_kind.is_tokens != bool(shown.labels):
        raise UserError(f"must be a run with the same tokens or images, got {str(workdir)!r}", "beside")
    length, most = shown.inputs.shape[1], getattr(config, "max_len", None)
    if shown.labels and most is not None and most < length:
        raise UserError(
            f"must be a run that reads {length} tokens, got one that reads {most}; lower max_tokens", "beside"
        )
    if shown.labels:
        largest, size = int(shown.inputs.max()), getattr(config, "vocab_size", None)
        must = f"a run with a vocab_size above the shown id {largest}"
        require(size is None or largest < size, "beside", str(workdir), must)
    else:
        shape = shown.inputs.shape[1:]
        must = f"a run on images of the shape {shape}"
        require(config.input_row()[0] == shape, "beside", str(workdir), must)
    model = models.build(config)
    _, params = load_params(folder, model, "latest", note)
    its = trace(model, params, shown.inputs)
    if seen.layers:
        ours, theirs = ({layer.inputs.shape[1] for layer in one.layers} for one in (seen, its))
        must = f"a run whose mixers read {max(ours)} positions, as this run's"
        require(ours == theirs, "beside", str(workdir), must)
    return json_values.Other(f"run {workdir.resolve().name}", its, params)


def _facts(
    experiment: Experiment, rows: Sequence[Mapping[str, Any]], params: optax.Params, shown: Example, unit: str
) -> list[tuple[str, str]]:
    """The table at the top of the page; `unit` is of losses, in parentheses, or empty."""
    model = experiment.model
    names = [MIXER_CONFIGS.part_of(type(mixer)).name for mixer in getattr(model, "pattern", ())]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = [("mixers", ", ".join(names)), ("parameters", f"{count:,}")]
    if hasattr(model, "n_layers"):
        size = f"{model.n_layers} layers, width {model.d_model}, at most {model.max_len} positions"
        facts.insert(1, ("size", size))
    losses = [row["validation/loss"] for row in rows if row.get("validation/loss") is not None]
    if losses:
        values = f"{losses[-1]:.4f} at the end, {min(losses):.4f} at best"
        facts.append((f"validation loss{unit}", values))
    return [*facts, ("shown", shown.source)]


def _lengths(layer: Mapping[str, Any]) -> list[str]:
    """A row of the table of effective lengths: the median of each, and its quartiles."""
    names = [name for name in ("quartilesBefore", "quartilesAfter") if name in layer]
    quartiles = ("{1:.0f} ({0:.0f} to {2:.0f})".format(*layer[name]) for name in names)
    return [layer["name"], str(layer["count"] * layer["width"]), str(layer["length"]), *quartiles]


def _symbol(encoding: Encoding, token: int) -> str:
    """The text of an id; empty for -1, which stands for none."""
    if token < 0:
        return ""
    is_known = is_tokenizer(encoding) and token < encoding.vocab_size
    return piece(encoding, int(token)) if is_known else str(token)
