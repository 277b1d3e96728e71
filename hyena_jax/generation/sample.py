"""Text on the screen as it is generated, and the sample that ends a training run on text."""

from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import numpy as np
import optax

from hyena_jax.config import Experiment
from hyena_jax.data.dataset import Dataset
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.generation.decoding import Request, generate
from hyena_jax.generation.programs import Chunk
from hyena_jax.system import files


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
    """Continues the run's prompt by `logging.sample_tokens` tokens, on the screen and in the file at `path`.

    Args:
      data: with a `tokenizer`, and a `prompt`.
    """
    prompt = data.prompt(experiment.logging.sample_prompt)
    n_symbols = data.tokenizer.vocab_size
    request = Request(experiment.logging.sample_tokens, seed=experiment.seed, n_symbols=n_symbols)
    text = stream(data.tokenizer, prompt, generate(model, params, [prompt], request))
    files.write_text(path, text)
