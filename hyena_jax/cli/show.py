"""`hyena-jax show`: one page about a trained run, to be opened in a browser."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hyena_jax.cli.base import OfRun, note, say
from hyena_jax.config import AtLeast, Between
from hyena_jax.system.errors import require
from hyena_jax.system.files import require_new_file
from hyena_jax.system.startup import start_jax
from hyena_jax.system.storage.location import Location

if TYPE_CHECKING:
    from hyena_jax.inspect.content import Example

MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class ShowRun(OfRun):
    """Look into a run: write one page with its mixing matrices, filters, gates and losses.

    The page needs no network and no other file. It shows the model at work on one text or image: by default
    the first that the run held out.
    """

    text: str | None = None
    """Text to show the model with."""
    path: str | None = None
    """Text file whose beginning is shown; for a run on images, a folder of IDX images."""
    index: Annotated[int, AtLeast(0)] = 0
    """Number of the held-out row or image, without --text or --path; or of the image in --path."""
    max_tokens: Annotated[int, Between(1, MAX_TOKENS)] = MAX_TOKENS
    """Most tokens of a text, up to 512 and the model's longest sequence."""
    beside: Path | Location | None = None
    """Folder of another run on the same kind of data, such as one of attention: its curves, sample and mixing
    matrices are shown next to this run's, in place of attention without parameters."""
    output: Path | None = None
    """New HTML file; by default show.html in the run's folder, where it replaces an earlier one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.text is None or self.path is None, "path", self.path, "None together with text")
        if self.output is not None:
            require_new_file("output", self.output)

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        from hyena_jax.inspect.content import content
        from hyena_jax.inspect.page import page
        from hyena_jax.system import files
        from hyena_jax.system.storage.mirror import share

        text = page(content(self.workdir, self.step, self._example(), self.beside, note))
        path = self.output or self.workdir / "show.html"
        files.write_text(path, text, is_new=path == self.output)
        share(path)
        say(f"page: {path}   {len(text.encode()) / 1e6:.1f} MB, to be opened in a browser")
        return 0

    def _example(self) -> "Example":
        from hyena_jax.data.tokenizers import is_tokenizer
        from hyena_jax.inspect.content import from_file, from_text, held_out
        from hyena_jax.training.evaluate import load_data
        from hyena_jax.training.folder import read_folder

        folder = read_folder(self.workdir)
        experiment, workdir = folder.experiment, str(self.workdir)
        most = min(self.max_tokens, getattr(experiment.model, "max_len", MAX_TOKENS))
        is_tokens = experiment.data.input_kind.is_tokens
        if self.text is not None or (self.path is not None and is_tokens):
            is_text = is_tokens and is_tokenizer(folder.encoding)
            require(is_text, "workdir", workdir, "a run on text, or on tokens with a tokenizer")
            if self.text is not None:
                return from_text(folder.encoding, self.text, most)
            return from_file(folder.encoding, Path(self.path), most)
        has_patches = is_tokens or hasattr(experiment.model, "patch_size")
        require(has_patches, "workdir", workdir, "a run on tokens, or one of a model with patches of images")
        return held_out(load_data(folder, self.path), folder.encoding, self.index, most)
