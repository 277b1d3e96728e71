"""`hyena-jax convert`: weights of another project as a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyena_jax.cli.base import Command, note, say
from hyena_jax.config.flags import positional
from hyena_jax.system.startup import start_jax


@dataclass(frozen=True)
class Convert(Command):
    """Read weights of another project into a new run folder."""

    format: Literal[
        "recurrentgemma", "lfm2", "olmo_hybrid", "safari", "hyenadna", "stripedhyena2", "rwkv7"
    ] = field(metadata=positional("FORMAT"))
    """The family of models: `recurrentgemma`, `lfm2`, `olmo_hybrid`, `safari`, `hyenadna`, `stripedhyena2` or
    `rwkv7`."""
    source: Path = field(metadata=positional("SOURCE"))
    """A `.safetensors` or PyTorch file, or a folder of `transformers` or (RecurrentGemma) of Orbax."""
    output: Path
    """Folder of the new run; must not exist, or be empty."""
    config: Path | None = None
    """The model's config, JSON or YAML; without it, `config.json` next to the weights."""
    tokenizer: Path | None = None
    """A `tokenizer.json`, or a SentencePiece `.model`, instead of the one next to the weights."""
    max_len: int | None = None
    """Longest sequence of the model; without it, what its config says, 8192 for recurrentgemma, or 4096 for a
    file of RWKV-LM."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations."""
    window_shift: float | None = None
    """Only hyenadna: the constant added to the filters' window. None is 0.05, as in its standalone file; its
    training code has 0, and no config says which."""

    window_of: Literal["deepmind", "transformers"] | None = None
    """Only recurrentgemma: the code that it was trained with. A token sees attention_window_size earlier ones
    in DeepMind's, which None takes, and one less in transformers."""

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        from hyena_jax.interop.convert import convert
        from hyena_jax.interop.family import Options

        options = Options(self.config, self.max_len, self.dtype, self.window_shift, self.window_of)
        found = convert(self.format, self.source, self.output, options, self.tokenizer)
        tokenizer = f"tokenizer {found.tokenizer.kind}, {found.tokenizer.vocab_size:,} symbols"
        say(f"{found.n_tensors:,} tensors, {found.n_parameters:,} parameters; {tokenizer}")
        if found.note is not None:
            say(found.note)
        say(f"run folder: {self.output}")
        return 0
