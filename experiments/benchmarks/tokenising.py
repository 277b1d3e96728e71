"""Tokens a second of `hyena-jax prepare`, and of its tokenizer library alone on the same documents.

    python experiments/benchmarks/tokenising.py texts/ --tokenizer-path tokenizer.json

Both use one thread, in turns; `prepare` also reads, hashes and writes. The ratio is of CPU times, which other
work on the machine disturbs less.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers

from hyena_jax.cli.base import script_flags
from hyena_jax.config.flags import positional
from hyena_jax.data.documents import read_documents
from hyena_jax.data.prepare import make_plan, prepare
from hyena_jax.data.tokenizers import read_bpe


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    input: str = field(metadata=positional("INPUT"))
    tokenizer_path: str
    field: str = "text"
    rounds: int = 5


def cpu_seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def main(settings: Settings) -> None:
    library = tokenizers.Tokenizer.from_file(settings.tokenizer_path)
    plan = make_plan([settings.input], read_bpe(settings.tokenizer_path), field=settings.field)
    spans = [span for part in plan.parts for span in part]
    texts = [document.text for span in spans for document in read_documents(span, settings.field, None)]
    n_tokens = sum(len(found.ids) for found in library.encode_batch_fast(texts, add_special_tokens=False))
    seconds: dict[str, list[float]] = {"library": [], "prepare": []}

    def prepared() -> None:
        with tempfile.TemporaryDirectory() as folder:
            prepare(plan, folder, 1, lambda n_bytes, n_tokens: None)

    def encoded() -> None:
        library.encode_batch_fast(texts, add_special_tokens=False)

    for _ in range(settings.rounds):
        seconds["library"].append(cpu_seconds(encoded))
        seconds["prepare"].append(cpu_seconds(prepared))
    for name, found in seconds.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        rates = ", ".join(f"{n_tokens / x / 1e6:.2f}" for x in (middle, high, low))
        print(f"{name}: million tokens a second of CPU, median, lowest and highest: {rates}")
    ratios = [ours / theirs for ours, theirs in zip(seconds["library"], seconds["prepare"], strict=True)]
    print(f"prepare / library: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")


if __name__ == "__main__":
    main(script_flags(Settings))
