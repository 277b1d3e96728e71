"""`hyena-jax show`: one page about a trained run, to be opened in a browser."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyena_jax.cli.base import OfRun, note
from hyena_jax.config import require
from hyena_jax.startup import start_jax

if TYPE_CHECKING:
    from hyena_jax.inspect.subject import Subject
    from hyena_jax.training.folder import RunFolder

MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Show(OfRun):
    """Look into a run: write one page with its mixing matrices, filters, gates and losses.

    The page needs no network and no other file. It shows the model at work on one text or image: by default
    the first that the run held out.
    """

    text: str | None = None
    """Text to show the model with."""
    path: str | None = None
    """Text file whose beginning is shown; for a run on images, a folder of IDX images."""
    index: int = 0
    """Number of the held-out row or image, without --text or --path; or of the image in --path."""
    max_tokens: int = MAX_TOKENS
    """Most tokens of a text, up to 512 and the model's longest sequence."""
    beside: Path | None = None
    """Folder of another run on the same kind of data, such as one of attention: its mixing matrices are shown
    next to this run's, in place of attention without parameters."""
    output: Path | None = None
    """New HTML file; by default show.html in the run's folder, where it replaces an earlier one."""

    def run(self, arguments: Sequence[str]) -> int:
        """Computes everything, then writes the page."""
        _check(self)
        start_jax(note)

        from hyena_jax import files
        from hyena_jax.inspect.content import content
        from hyena_jax.inspect.page import page
        from hyena_jax.training.folder import read_run

        workdir = self.workdir
        shown = _subject(self, read_run(workdir))
        text = page(content(workdir, self.step, shown, self.beside, note))
        path = self.output or workdir / "show.html"
        files.write_text(path, text)
        print(f"page: {path}   {len(text.encode()) / 1e6:.1f} MB, to be opened in a browser")
        return 0


def _check(command: Show) -> None:
    """Refuses flags that are wrong for every run."""
    require(command.text is None or command.path is None, "path", command.path, "None together with text")
    require(command.index >= 0, "index", command.index, "at least 0")
    in_range = 1 <= command.max_tokens <= MAX_TOKENS
    require(in_range, "max_tokens", command.max_tokens, f"in 1..{MAX_TOKENS}")
    if command.output is not None:
        require(not command.output.exists(), "output", str(command.output), "a file that does not exist yet")
        parent = command.output.parent
        require(parent.is_dir(), "output", str(command.output), "in an existing folder")


def _subject(command: Show, folder: "RunFolder") -> "Subject":
    """What the model is shown with."""
    from hyena_jax.data.tokenizers import is_tokenizer
    from hyena_jax.inspect import subject
    from hyena_jax.training.evaluate import load_data

    experiment, workdir = folder.experiment, str(command.workdir)
    most = min(command.max_tokens, getattr(experiment.model, "max_len", MAX_TOKENS))
    is_tokens = experiment.data.input_kind.is_tokens
    if command.text is not None or (command.path is not None and is_tokens):
        is_text = is_tokens and is_tokenizer(folder.encoding)
        require(is_text, "workdir", workdir, "a run on text, or on tokens with a tokenizer")
        if command.text is not None:
            return subject.from_text(folder.encoding, command.text, most)
        return subject.from_file(folder.encoding, Path(command.path), most)
    has_patches = is_tokens or hasattr(experiment.model, "patch_size")
    require(has_patches, "workdir", workdir, "a run on tokens, or one of a model with patches of images")
    data = load_data(folder, command.path)
    return subject.held_out(data, folder.encoding, command.index, most)
