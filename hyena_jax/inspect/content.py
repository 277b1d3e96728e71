"""What the page about a run holds: an example, and the run and its model at work on it.

An example is a text, a held-out row of tokens, or a held-out image. Axes: L tokens or patches, V classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import softmax

from hyena_jax import models
from hyena_jax.config import MIXER_CONFIGS, Experiment, encode, read_stages, stage_changes
from hyena_jax.data.dataset import Batch, Dataset, Encoding
from hyena_jax.data.text import BYTE_ORDER_MARK, decoded
from hyena_jax.data.tokenizers import Tokenizer, encode_start, is_tokenizer
from hyena_jax.inspect import json_values, page
from hyena_jax.inspect.tracing import Trace, trace
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import METRICS, read_bytes
from hyena_jax.system.output import bar
from hyena_jax.system.trees import n_entries
from hyena_jax.training import lora, metrics
from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.folder import BASE, RunFolder, read_folder
from hyena_jax.training.initial import load_params, read_base
from hyena_jax.training.loss import cross_entropy
from hyena_jax.training.step import init_params

# The largest text file, and the most characters of it that are encoded for each token shown.
MAX_BYTES, MAX_CHARACTERS = 2**26, 64
BOS = "<bos>"


class Example(NamedTuple):
    """One input of a model.

    Attributes:
      inputs: tokens int32 [1, L], or an image [1, height, width, colours].
      labels: the text of each token; empty for an image.
      targets: what the model should say at each position, int32 [1, L], or the label [1] of an image.
      weights: 0 where a target does not count, of the shape of `targets`.
      shift: 1 if target t is token t + 1, as in a text; 0 if it is an answer at position t.
      source: where it comes from, to be printed.
    """

    inputs: np.ndarray
    labels: tuple[str, ...]
    targets: np.ndarray
    weights: np.ndarray
    shift: int
    source: str


class Scores(NamedTuple):
    """How a model predicts each token of an example; NaN and -1 where nothing is predicted.

    Attributes:
      nats: the loss of each token [L].
      guess: the most probable id in its place [L].
      probability: what the model gave the guess [L].
    """

    nats: np.ndarray
    guess: np.ndarray
    probability: np.ndarray


def from_text(tokenizer: Tokenizer, text: str, most: int, path: Path | None = None) -> Example:
    """The first `most` tokens of a text, from a file if `path` is given; `bos` is one of them."""
    name = "text" if path is None else f"path {str(path)!r}"
    try:
        ids = np.asarray(encode_start(tokenizer, text[: MAX_CHARACTERS * most]), np.int32)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    n_starts = int(getattr(tokenizer, "bos", None) is not None)
    require(len(ids) > n_starts, name, text[:40], "at least one token long")
    is_whole, ids = len(ids) <= most and len(text) <= MAX_CHARACTERS * most, ids[:most]
    part = "all" if is_whole else "the first"
    source = f"{part} {len(ids)} tokens of {'the given text' if path is None else path}"
    targets = np.append(ids[1:], 0)
    weights = np.append(np.ones(len(ids) - 1, np.float32), np.float32(0))
    return Example(ids[None], _pieces(tokenizer, ids), targets[None], weights[None], 1, source)


def from_file(tokenizer: Tokenizer, path: Path, most: int) -> Example:
    """The first `most` tokens of a text file in UTF-8."""
    text = decoded("path", read_bytes("path", path, MAX_BYTES), repr(str(path)))
    return from_text(tokenizer, text.removeprefix(BYTE_ORDER_MARK), most, path)


def held_out(data: Dataset, encoding: Encoding, index: int, most: int) -> Example:
    """A held-out row: the first `most` tokens of a window, or of its longest document; or an image."""
    n_rows = data.n_eval_rows()
    require(0 <= index < n_rows, "index", index, f"in 0..{n_rows - 1}, the held-out rows")
    batch = next(islice(data.eval_batches(1), index, None))
    is_image = batch["inputs"].ndim > 2
    source = f"held-out {'image' if is_image else 'row'} {index}; data: {data.source}"
    if is_image:
        return Example(batch["inputs"], (), batch["targets"], batch["weights"], 0, source)
    inputs, targets, weights = batch["inputs"], _everywhere(batch, "targets"), _everywhere(batch, "weights")
    require(targets.shape == inputs.shape, "the shape of a row's targets", targets.shape[1:], "one a token")
    if "segment_ids" in batch:  # all of the row would be read as one document
        ids = batch["segment_ids"][0]
        longest = ids == np.bincount(ids).argmax()
        inputs, targets, weights = (x[:, longest] for x in (inputs, targets, weights))
        source = f"the longest document of {source}"
    # What a target without weight says does not count: a text's last window ends with padding.
    counts = weights[0] > 0
    inside = counts[:-1]
    is_text = inside.any() and np.array_equal(targets[0, :-1][inside], inputs[0, 1:][inside])
    if is_text:  # the last target that counts is one token further
        most = min(most, np.flatnonzero(counts)[-1] + 2)
    inputs, targets, weights = (x[:, :most] for x in (inputs, targets, weights))
    labels = _pieces(encoding, inputs[0]) if is_tokenizer(encoding) else tuple(f"{i} " for i in inputs[0])
    source = f"{inputs.shape[1]} tokens, {source}"
    return Example(inputs, labels, targets, weights, int(is_text), source)


def _everywhere(batch: Batch, name: str) -> np.ndarray:
    """`targets` or `weights` at every input [1, L]; 0 where the batch's `positions` name none."""
    if "positions" not in batch:
        return batch[name]
    whole = np.zeros(batch["inputs"].shape, batch[name].dtype)
    np.put_along_axis(whole, batch["positions"], batch[name], axis=1)
    return whole


def _pieces(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[str, ...]:
    return tuple(piece(tokenizer, int(i)) for i in ids)


def piece(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; decoding leaves `bos` out, which is to be seen here."""
    return BOS if token == getattr(tokenizer, "bos", None) else tokenizer.decode([token])


def scores(example: Example, logits: np.ndarray) -> Scores:
    """How logits [1, L, V] predict the tokens of an example; token 0 of a text is not predicted."""
    nats = np.asarray(cross_entropy(jnp.asarray(logits), jnp.asarray(example.targets)))[0].astype(np.float64)
    probabilities = softmax(np.asarray(logits, np.float64), axis=-1)[0]
    counts = example.weights[0] > 0
    found = Scores(
        np.where(counts, nats, np.nan),
        np.where(counts, probabilities.argmax(-1), -1),
        np.where(counts, probabilities.max(-1), np.nan),
    )
    if example.shift == 0:
        return found
    return Scores(
        *(np.insert(x[:-1], 0, nothing) for x, nothing in zip(found, (np.nan, -1, np.nan), strict=True))
    )


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
    runs = {"": workdir} if other is None else {"": workdir, other.name: other.workdir}
    rows_of = {name and f", {name}": metrics.read_rows(folder / METRICS) for name, folder in runs.items()}
    stages = read_stages(workdir, experiment)
    changes = [(f"from step {step} on", "; ".join(lines)) for step, lines in stage_changes(stages).items()]
    unit = "" if not experiment.loss.in_nats else " (nats per token)" if shown.labels else " (nats)"
    titles = {"loss": f"loss{unit}", "accuracy": "accuracy (share guessed right)"}
    titles |= {"learning_rate": "learning rate", "grad_norm": "norm of the gradient, before clipping"}
    charts = {f"curve-{name}": json_values.curves(rows_of, name, title) for name, title in titles.items()}
    charts["activations"] = json_values.activations(seen)
    image = None
    if shown.labels:
        found, labels = scores(shown, seen.outputs), shown.labels
        guesses = [_symbol(folder.encoding, token) for token in found.guess]
        body = page.losses(labels, found.nats, guesses, found.probability)
        paths = {of: folder / "sample.txt" for of, folder in runs.items()}  # of runs that ended with a text
        read = {of: read_bytes("sample", path, MAX_BYTES) for of, path in paths.items() if path.exists()}
        body += page.samples({of: decoded("sample", text, repr(str(paths[of]))) for of, text in read.items()})
    else:
        image = json_values.image(shown.inputs[0], experiment.model.patch_size)
        labels = tuple(str(i) for i in range(image["grid"][0] * image["grid"][1]))
        classes = softmax(np.asarray(seen.outputs, np.float64), axis=-1)
        classes = classes.mean(1) if classes.ndim == 3 else classes  # one answer for each patch
        target = shown.targets[0]  # a class, a number, or one for each patch
        is_class = np.ndim(target) == 0 and np.issubdtype(shown.targets.dtype, np.integer)
        body = page.probabilities(classes[0], int(target) if is_class else None)
    return page.Content(
        title=f"{workdir.resolve().name}, step {number}",
        facts=_facts(experiment, rows_of[""], params, shown, unit) + changes,
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
    return json_values.Other(f"run {workdir.resolve().name}", workdir, its, params)


def _facts(
    experiment: Experiment, rows: Sequence[Mapping[str, Any]], params: optax.Params, shown: Example, unit: str
) -> list[tuple[str, str]]:
    """The table at the top of the page; `unit` is of losses, in parentheses, or empty."""
    model = experiment.model
    names = [MIXER_CONFIGS.part_of(type(mixer)).name for mixer in getattr(model, "pattern", ())]
    facts = [("mixers", ", ".join(names)), ("parameters", f"{n_entries(params):,}")]
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
