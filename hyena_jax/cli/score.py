"""`hyena-jax score`: the log-likelihood of each line of a text, or of each record of a FASTA file."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyena_jax.cli.base import OfRun, note
from hyena_jax.system.startup import start_jax


@dataclass(frozen=True, kw_only=True)
class Score(OfRun):
    """Log-likelihood, bits a byte and perplexity of each line of a text, or of each record of a FASTA file.

    A token is predicted from all tokens before it in its line or record; beyond the model's max_len, from the
    tokens in its window: see --stride.
    """

    path: Path
    """UTF-8 file. Its symbols are read by the run's tokenizer, also lower case and N of DNA."""
    format: Literal["auto", "lines", "fasta"] = "auto"
    """Records of the file; `auto`: FASTA for .fa, .fasta, .fna, .ffn and .faa, else lines."""
    prefix: str = ""
    """Text before each record: context that is not scored. Without it, and without a start token (BOS) of the
    tokenizer, nothing precedes the first token of a record, and it is not scored either."""
    stride: int | None = None
    """New tokens scored by each window after the first, at most max_len; None takes half of max_len. A token
    beyond max_len is predicted from the max_len - stride + 1 to max_len tokens before it."""
    per_token: bool = False
    """Also write the token ids and the log-probability of each."""
    batch_size: int = 16
    """Windows of max_len tokens at once, or as many tokens in shorter ones."""
    output: Path | None = None
    """JSON-lines file, continued if the same command was stopped; None prints the lines."""

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        from hyena_jax.api import load_run
        from hyena_jax.data.records import read_records, same_names
        from hyena_jax.generation.saved_state import origin
        from hyena_jax.scoring import score_file
        from hyena_jax.system.output import bar

        records = read_records(self.path, self.format)
        if (shared := same_names(records)) is not None:
            note(shared)
        run = load_run(self.workdir, self.step)
        names, texts = [record.name for record in records], [record.text for record in records]
        called = [f"record {name} of {self.path}" for name in names]
        scoring = run.scoring(texts, called, self.prefix, self.stride, self.batch_size)
        digest = hashlib.sha256()  # of all names, token ids and sizes
        for name, text in zip(names, scoring.texts, strict=True):
            digest.update(json.dumps([name, len(text.tokens), text.n_bytes]).encode())
            digest.update(text.tokens.astype("<i4").tobytes())
        is_first_scored = len(scoring.context) > 0
        about = {
            "step": run.step,
            "model": origin(run.experiment.model, run.params),
            "texts": digest.hexdigest(),
            "prefix": self.prefix,
            "first_token": "scored" if is_first_scored else "not scored",
            "max_len": scoring.plan.max_len,
            "stride": scoring.plan.stride,
            "batch_size": self.batch_size,
            "per_token": self.per_token,
        }
        if self.output is None:
            _print([{score_file.ABOUT: about}])
            opened = nullcontext(([], _print))
        else:
            opened = score_file.continued(self.output, about, names)
        with opened as (scored, write):
            n_done = len(scored)
            blocks = [block for block in scoring.plan.blocks() if block.stop > n_done]
            n_windows = sum(map(scoring.plan.n_windows, blocks))
            with bar("scoring", n_windows) as advance:
                for block, found in zip(blocks, scoring.likelihoods(n_done, advance), strict=True):
                    rows = [
                        score_file.row(names[i], likelihood, self.per_token)
                        for i, likelihood in zip(block, found, strict=True)
                        if i >= n_done
                    ]
                    write(rows)
                    scored += [{name: row[name] for name in score_file.COUNTED} for row in rows]
        line = score_file.total(scored)
        if not is_first_scored:
            line += "; the first token of a record, which nothing precedes, is not scored"
        (note if self.output is None else print)(line)
        return 0


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    from hyena_jax.scoring.score_file import text_of

    sys.stdout.write("".join(map(text_of, rows)))
    sys.stdout.flush()
