"""`hyena-jax prepare`: text of any size to shards of token ids, for `--data shards`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from hyena_jax.cli.base import Command, say
from hyena_jax.config import AtLeast, Between, TextConfig
from hyena_jax.config.flags import positional
from hyena_jax.system.errors import require
from hyena_jax.system.files import n_cpus
from hyena_jax.system.storage.location import is_url

ROW_EVERY = 10.0
"""Seconds between two rows of progress, without a terminal."""


@dataclass(frozen=True, kw_only=True)
class Prepare(Command):
    """Tokenise text of any size to shards for `--data shards`, on all cores; the same command continues.

    INPUT is a text, .jsonl (also .gz, .zst), .ndjson, .parquet, a folder of such files, or a split of
    TensorFlow Datasets as tfds:NAME:SPLIT. The same input and settings give the same bytes, whatever the
    number of workers.
    """

    inputs: tuple[str, ...] = field(default=(), metadata=positional("INPUT"))
    """Files and folders to read, in this order; those of a folder are ordered by path."""
    output: str
    """New folder, or one that the same command began; or gs://BUCKET/NAME."""
    tokenizer: Literal["bpe", "sentencepiece", "bytes", "dna"] = "bpe"
    """Tokens: the pieces of `tokenizer_path`, UTF-8 bytes, or DNA's bases."""
    tokenizer_path: str | None = None
    """The `tokenizer.json` of a byte-pair tokenizer (tokenizer=bpe), or a SentencePiece `.model`."""
    eos: int | str | None = None
    """Token that ends every document: its id, or its text, such as `<|endoftext|>`; None writes none."""
    field: str = "text"
    """Key of a document's text in JSON, Parquet or TensorFlow Datasets."""
    held_out: Annotated[float, Between(0, 0.5, "[]")] = 0.001
    """Part of all documents that is held out, chosen by a hash of their text; texts are held out in pieces of
    64 KiB."""
    shard_bytes: Annotated[int, AtLeast(1)] = 2**27
    """Bytes of the input in a shard, at least, where it can be cut."""
    workers: Annotated[int | None, AtLeast(1)] = None
    """Processes; None: one for each core."""
    tfds_dir: str | None = None
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = None
    """Folder with a source file that you downloaded (the data set's manual_dir)."""
    verify: bool = False
    """Write nothing: compare all shards in the output with their index, by their SHA-256."""

    def run(self, arguments: Sequence[str]) -> int:
        from hyena_jax.data import prepare
        from hyena_jax.data.tokenizers import build_tokenizer

        require(self.output != "", "output", self.output, "a folder, or gs://BUCKET/NAME")
        workers = self.workers or n_cpus()
        if self.verify:
            require(self.inputs == (), "INPUT", " ".join(self.inputs), "left out with --verify")
            with _progress("verifying", None) as advance:
                index = prepare.verify(self.output, workers, advance)
            say(f"{len(index.shards) + len(index.held_out):,} shards are as their index says: {self.output}")
            return 0
        require(self.inputs != (), "INPUT", "", "files, folders, or tfds:NAME, or --verify given")
        for given in self.inputs if not is_url(self.output) else ():
            is_inside = Path(given).is_dir() and Path(self.output).resolve().is_relative_to(
                Path(given).resolve()
            )
            require(not is_inside, "output", self.output, f"outside of INPUT {given!r}, which would be read")
        text = TextConfig(tokenizer=self.tokenizer, tokenizer_path=self.tokenizer_path)
        plan = prepare.make_plan(
            self.inputs,
            build_tokenizer(text),
            self.eos,
            self.held_out,
            self.field,
            self.shard_bytes,
            self.tfds_dir,
            self.manual_dir,
        )
        with _progress("preparing", plan.size) as advance:
            index = prepare.prepare(plan, self.output, workers, advance)
        has_text = any(shard.tokens for shard in index.shards + index.held_out)
        require(has_text, "INPUT", " ".join(self.inputs), "files with some text (all documents are empty)")
        for what, shards in (("to train on", index.shards), ("held out", index.held_out)):
            n_tokens, n_documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
            print(f"{what}: {n_tokens:,} tokens, {n_documents:,} documents in {len(shards):,} shards")
        if not index.held_out and self.held_out > 0:
            few = f"so few documents that none is held out by --held-out {self.held_out:g}"
            print(f"{few}: raise it for a new folder, or prepare other texts to evaluate on")
        sources = f"--data shards --data.sources {self.output}"
        say(f"train with: {sources}" + ("" if index.held_out else " --data.validation-sources OTHER_SHARDS"))
        return 0


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens a second and the time left; rows of text where there is no terminal.

    Yields `advance(bytes, tokens)`; the first call says what was done before.
    """
    from rich.progress import TimeRemainingColumn

    from hyena_jax.system.output import VALUES, Bar, Output

    begun, done, n_tokens = time.monotonic(), 0, 0
    with Bar(Output(stderr=True), what, total, VALUES, TimeRemainingColumn(), transient=True) as live:
        live.is_row_due(ROW_EVERY)  # the first one is due after so many seconds

        def advance(n_bytes: int, tokens: int) -> None:
            nonlocal done, n_tokens
            done, n_tokens = done + n_bytes, n_tokens + tokens
            speed = f"{n_tokens / max(time.monotonic() - begun, 1e-3):,.0f} tokens/s"
            live.show(done, values=speed)
            if live.is_row_due(ROW_EVERY):
                share = None if total is None else f"{done / total:6.1%}"
                shown = (what, share, f"{n_tokens:,} tokens", speed, live.left(done))
                print("   ".join(filter(None, shown)), file=sys.stderr, flush=True)

        yield advance
