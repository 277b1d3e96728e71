"""`hyena-jax embed`: vectors of the lines of a text, or of the records of a FASTA file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyena_jax.cli.base import OfRun, note, say
from hyena_jax.system.files import replacing, require_new_file, write_text
from hyena_jax.system.startup import start_jax


@dataclass(frozen=True, kw_only=True)
class Embed(OfRun):
    """Vectors of each line of a text, or of each record of a FASTA file: the model's hidden states.

    --output is a NumPy array, float32 [rows, d_model], and beside it, with the suffix .jsonl, an index: for
    each record its name, tokens, first row and number of rows.
    """

    path: Path
    """UTF-8 file. Its symbols are read by the run's tokenizer, also lower case and N of DNA."""
    output: Path
    """New .npy file."""
    layer: int | None = None
    """Block after which the states are taken, 0 for the embedding; None takes what the head reads."""
    pool: Literal["mean", "last", "none"] = "mean"
    """Rows of a record: the mean of its tokens' states, that of its last token, or one for each token."""
    format: Literal["auto", "lines", "fasta"] = "auto"
    """Records of the file; `auto`: FASTA for .fa, .fasta, .fna, .ffn and .faa, else lines."""
    prefix: str = ""
    """Text before each record, which gets no rows."""
    stride: int | None = None
    """New tokens of each window after the first, at most max_len; None takes half of max_len. A token beyond
    max_len sees the max_len - stride + 1 to max_len last tokens, itself included."""
    batch_size: int = 16
    """Windows of max_len tokens at once, or as many tokens in shorter ones."""

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        import numpy as np

        from hyena_jax.api import load_run
        from hyena_jax.data.records import read_records, same_names
        from hyena_jax.system.errors import require
        from hyena_jax.system.output import bar

        index = self.output.with_suffix(".jsonl")
        require(self.output.suffix == ".npy", "output", str(self.output), "a .npy file")
        for file in (self.output, index):
            require_new_file("output", file)
        records = read_records(self.path, self.format)
        if (shared := same_names(records)) is not None:
            note(shared)
        run = load_run(self.workdir, self.step)
        texts = [record.text for record in records]
        called = [f"record {record.name} of {self.path}" for record in records]
        scoring = run.scoring(texts, called, self.prefix, self.stride, self.batch_size)
        embedding = scoring.embedding(called, self.layer, self.pool)
        sizes, first, lines = embedding.sizes, 0, []
        require(sum(sizes) > 0, "path", str(self.path), "a file with at least one token")
        shape = sum(sizes), run.model.config.d_model
        with replacing(self.output, is_new=True) as draft, open(draft, "wb") as file:
            # Not through a mapping: on a full disk that would kill the process.
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            n_windows = embedding.scoring.plan.n_windows(range(len(texts)))
            with bar("embedding", n_windows) as advance:
                vectors = embedding.vectors(advance)
                for record, text, rows in zip(records, embedding.scoring.texts, vectors, strict=True):
                    file.write(np.ascontiguousarray(rows, "<f4").data)
                    about = {"name": record.name, "tokens": len(text.tokens), "row": first, "rows": len(rows)}
                    lines.append(json.dumps(about, ensure_ascii=False) + "\n")
                    first += len(rows)
            file.flush()
            write_text(index, "".join(lines), is_new=True)
        say(f"{len(records):,} records, {first:,} vectors of {shape[1]} numbers: {self.output}, {index}")
        return 0
