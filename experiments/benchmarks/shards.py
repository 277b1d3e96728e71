"""Windows a second from shards: reads alone, and batches in their order, from a folder or a bucket.

    python experiments/benchmarks/shards.py shards/web
    python experiments/benchmarks/shards.py gs://BUCKET/web --seq-len 2048 --batch-size 256

The figures need an idle machine; those of a folder are of the page cache once a shard has been read.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from hyena_jax.cli.base import script_flags
from hyena_jax.config import ShardsConfig
from hyena_jax.config.flags import positional
from hyena_jax.data.dataset import iterate, load


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    source: str = field(metadata=positional("SOURCE"))
    seq_len: int = 2048
    batch_size: int = 256
    seconds: float = 4.0


def rate(name: str, read: Callable[[], object], settings: Settings) -> None:
    read()
    began, cpu, n = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < settings.seconds:
        read()
        n += settings.batch_size
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name:24} {n / seconds:10,.0f} windows/s  {n / cpu:10,.0f} a second of CPU")


def main(settings: Settings) -> None:
    config = ShardsConfig((settings.source,), validation_sources=(settings.source,), seq_len=settings.seq_len)
    began = time.perf_counter()
    data = load(config)
    print(f"{data.source}; opened in {time.perf_counter() - began:.3f} s")
    (source,), rng = data.train, np.random.default_rng(0)

    def raw() -> None:
        reads = []
        for shard in rng.integers(0, len(source.parts), settings.batch_size):
            part = source.parts[shard]
            start = int(rng.integers(0, part.tokens - settings.seq_len)) * part.dtype.itemsize
            stop = start + (settings.seq_len + 1) * part.dtype.itemsize
            reads.append((part, part.objects.begin(part.file, start, stop)))
        for part, future in reads:
            part.objects.finish(part.file, future)

    rate("reads", raw, settings)
    counter = itertools.count()
    first = np.arange(settings.batch_size)
    rate("batches", lambda: data.rows(0, next(counter) * settings.batch_size + first), settings)
    with closing(iterate(data.train_batches(settings.batch_size, 0), 0, data.n_readers)) as batches:
        rate("batches, read ahead", lambda: next(batches), settings)


if __name__ == "__main__":
    main(script_flags(Settings))
