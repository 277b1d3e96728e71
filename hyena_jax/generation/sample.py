"""What a training run ends with: a sample of text as it is generated, or a picture of predictions."""

import math
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax.config import Experiment
from hyena_jax.data.dataset import Dataset
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.generation.decoding import Request, generate
from hyena_jax.generation.programs import Chunk
from hyena_jax.system import files
from hyena_jax.training.loss import answers

RIGHT, WRONG = "#333333", "#c8442d"
COLUMNS = 8


def stream(tokenizer: Tokenizer, prompt: np.ndarray, chunks: Iterator[Chunk]) -> str:
    """Prints the prompt, and each chunk of its single row as it is generated; returns the whole text."""
    decode = tokenizer.stream()
    texts = [decode(prompt)]
    print(texts[0], end="", flush=True)
    for chunk in chunks:
        texts.append(decode(chunk.tokens[0][chunk.is_new[0]]))
        print(texts[-1], end="", flush=True)
    texts.append(decode([], final=True))
    print(texts[-1])
    return "".join(texts)


def write_sample(
    path: Path, model: nn.Module, params: optax.Params, data: Dataset, experiment: Experiment
) -> None:
    """Continues the run's prompt by `logging.sample_tokens` tokens, on the screen and in a file."""
    prompt = data.prompt(experiment.logging.sample_prompt)
    n_symbols = data.tokenizer.vocab_size
    request = Request(experiment.logging.sample_tokens, seed=experiment.seed, n_symbols=n_symbols)
    text = stream(data.tokenizer, prompt, generate(model, params, [prompt], request))
    files.write_text(path, text)


def has_labels(data: Dataset) -> bool:
    """Whether each row of the data has one integer as its target."""
    targets = next(data.eval_batches(1, 1))["targets"]
    return targets.ndim == 1 and targets.dtype.kind == "i"


def draw_predictions(
    model: nn.Module, params: optax.Params, data: Dataset, count: int, path: Path
) -> tuple[int, int]:
    """Draws `count` evenly spaced held-out images (or all) with their predicted labels, wrong ones in red.

    Returns:
      How many predictions are right, and how many images were drawn.
    """
    from matplotlib.figure import Figure

    count = data.n_eval_rows(count)
    (batch,) = data.eval_batches(count, count)
    logits = jax.jit(model.apply)({"params": params}, batch["inputs"])
    predicted, true = np.asarray(answers(logits, 1)), batch["targets"]
    images, n_right = batch["inputs"], int((predicted == true).sum())
    n_rows = math.ceil(count / COLUMNS)
    figure = Figure(figsize=(COLUMNS, 0.5 + 1.2 * n_rows), layout="constrained")
    figure.suptitle(f"{n_right} of {count} held-out images right", fontsize=11)
    shades = (images - images.min()) / (images.max() - images.min())
    panels = figure.subplots(n_rows, COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, image, answer, label in zip(panels[:count], shades, predicted, true, strict=True):
        axes.imshow(image if image.shape[-1] in (1, 3, 4) else image.mean(-1), cmap="gray_r")
        is_right = answer == label
        text = f"{answer}" if is_right else f"{answer}, not {label}"
        axes.set_title(text, fontsize=9, color=RIGHT if is_right else WRONG, pad=3)
    with files.replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=110)
    return n_right, count
