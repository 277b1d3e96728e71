"""Training on shards of token ids, in folders or buckets: windows are read when they are needed, many at a
time.

At a start the indices are read, and no token: see `shard_sources.py`. The order of rows is in `order.py`.

Shapes: B rows, L tokens of a row.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hyena_jax.config import ShardsConfig
from hyena_jax.data.dataset import Batch, Dataset, with_bits_per_byte
from hyena_jax.data.order import Turns, drawn, places, turns
from hyena_jax.data.shard_index import digest_of
from hyena_jax.data.shard_sources import ShardPart, eos_of, open_sources, tokenizer_of
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.system.errors import UserError, require


class Parts:
    """Shards in a row, and the windows in them."""

    def __init__(self, parts: Sequence[ShardPart], counts: Sequence[int]):
        kept = [(part, count) for part, count in zip(parts, counts, strict=True) if count > 0]
        self.parts = [part for part, _ in kept]
        self.tokens = np.array([part.tokens for part in self.parts], np.int64)
        self.counts = np.array([count for _, count in kept], np.int64)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each window [B], and its number in the shard."""
        shards = np.searchsorted(self._ends, windows, "right")
        return shards, windows - (self._ends - self.counts)[shards]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardSet(Dataset):
    """Shards to train on, by source, and shards to evaluate on.

    A shard of T tokens has floor((T - 1) / L) - 1 windows of L + 1 tokens, or one if it has no more. They lie
    side by side, so that the last token of one is the first of the next, and begin at another offset in each
    epoch. Evaluation reads windows side by side from the first token on, so that every token after it is
    predicted once.
    """

    kind: str = "tokens"
    tokenizer: Tokenizer
    train: tuple[Parts, ...]
    held_out: Parts
    turns: Turns
    seq_len: int
    """L."""
    eos: int | None
    """The id after which another document begins, to keep documents apart; None does not."""
    vocab_size: int
    held_out_bytes: int | None
    """UTF-8 bytes of the held-out text, for losses per byte; None if unknown."""
    fingerprint: str
    """SHA-256 over the indices, the weights and L, in hexadecimal."""
    source: str
    n_readers: int = 8
    n_train_rows: None = field(default=None, init=False)

    @property
    def n_held_out_rows(self) -> int:
        """Windows side by side in each shard; its last one may be shorter."""
        return len(self.held_out)

    @property
    def n_held_out(self) -> int:
        """All held-out tokens but the first of each shard."""
        return int((self.held_out.tokens - 1).sum())

    @property
    def units_per_row(self) -> int:
        return self.seq_len

    def _train_rows_of(self, seed: int) -> Callable[[np.ndarray], Batch]:
        return partial(self.rows, seed)

    def train_rows(self, indices: np.ndarray) -> Batch:
        """The rows of seed 0 with these numbers."""
        return self.rows(0, indices)

    def rows(self, seed: int, rows: np.ndarray) -> Batch:
        """Rows [B] of a run, int32 [B, L]: `inputs`, `targets`, and `segment_ids` to keep documents apart."""
        at = places(seed, rows, [len(source) for source in self.train], self.turns)
        reads: list[Any] = [None] * len(rows)
        for i, source in enumerate(self.train):
            ours = np.flatnonzero(at.source == i)
            shards, numbers = source.find(at.window[ours])
            # Windows begin at most so far from the start that all fit, and less than L.
            most = np.minimum(
                source.tokens[shards] - 1 - source.counts[shards] * self.seq_len, self.seq_len - 1
            )
            offsets = np.array([drawn(seed, i, int(epoch))[-1] for epoch in at.epoch[ours]], np.uint64)
            starts = numbers * self.seq_len + (offsets % (most + 1).astype(np.uint64)).astype(np.int64)
            for row, shard, start in zip(ours, shards, starts, strict=True):
                reads[row] = source.parts[shard], int(start)
        return self._batch(self._read(reads))

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        """The windows with these numbers; `weights` are 0 where a shard's last one is padded with token 0."""
        shards, numbers = self.held_out.find(indices)
        starts = numbers * self.seq_len
        reads = [
            (self.held_out.parts[shard], int(start)) for shard, start in zip(shards, starts, strict=True)
        ]
        inside = starts[:, None] + np.arange(1, self.seq_len + 1) < self.held_out.tokens[shards][:, None]
        return {**self._batch(self._read(reads)), "weights": inside.astype(np.float32)}

    def _read(self, reads: Sequence[tuple[ShardPart, int]]) -> np.ndarray:
        """L + 1 tokens, int32 [B, L + 1], of each shard from a token on; 0 beyond its end.

        All reads are begun first. UserError if a shard has become shorter, or an id is not in the vocabulary.
        """
        futures = []
        for part, start in reads:
            stop = min(start + self.seq_len + 1, part.tokens)
            size = part.dtype.itemsize
            futures.append(part.objects.begin(part.file, start * size, stop * size))
        tokens = np.zeros((len(reads), self.seq_len + 1), np.int32)
        for row, (part, _), future in zip(tokens, reads, futures, strict=True):
            found = np.frombuffer(part.objects.finish(part.file, future), part.dtype)
            row[: len(found)] = found
        # uint32 ids from 2**31 on are negative here.
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            i = int(np.argmax(((tokens < 0) | (tokens >= self.vocab_size)).any(1)))
            part, largest = reads[i][0], int(tokens[i].view(np.uint32).max())
            must = f"ids below the vocabulary's size {self.vocab_size}"
            require(False, f"{part.objects / part.file}", largest, must)
        return tokens

    def _batch(self, tokens: np.ndarray) -> Batch:
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        if self.eos is not None:
            ended = np.cumsum(tokens[:, :-1] == self.eos, axis=1, dtype=np.int32)
            batch["segment_ids"] = np.pad(ended[:, :-1], ((0, 0), (1, 0)))
        return batch

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        n_tokens = int(self.held_out.tokens.sum())
        return with_bits_per_byte(super().metrics(sums), sums, n_tokens, self.held_out_bytes)


def load_shards(config: ShardsConfig, tokenizer: Tokenizer | None = None) -> ShardSet:
    """The shards of `config`; `tokenizer` is the tokenizer of a run that is opened again, or None.

    UserError says which shard is missing or changed, which source is too short, or what does not fit.
    """
    must = "folders of shards, as `hyena-jax prepare` writes them, or .bin files"
    require(config.sources != (), "data.sources", (), must)
    sources = open_sources("sources", config.sources, config)
    validation = open_sources("validation_sources", config.validation_sources, config)
    every = [one for group in (sources, validation) for found in group.values() for one in found]
    tokenizer = tokenizer_of(every, config, tokenizer)
    eos = eos_of(every, config, tokenizer.vocab_size)
    if config.weights is not None and len(config.weights) != len(sources):
        must = f"{len(sources)} numbers, one for each source: {', '.join(sources)}"
        require(False, "weights", config.weights, must)
    length = config.seq_len

    def windows_to_train(part: ShardPart) -> int:
        return 0 if part.tokens <= length else max(1, (part.tokens - 1) // length - 1)

    train = {name: [part for one in found for part in one.train] for name, found in sources.items()}
    if config.weights is None:  # every window of all sources once an epoch
        train = {", ".join(train): [part for parts in train.values() for part in parts]}
    pools = {name: Parts(parts, list(map(windows_to_train, parts))) for name, parts in train.items()}
    for name, pool in pools.items():
        longest = max((part.tokens for part in train[name]), default=0)
        found = (
            f"its longest shard has {longest:,} tokens, and seq_len={length} needs at least {length + 1:,}"
        )
        if len(pool) == 0:
            raise UserError(f"source {name!r} is too short: {found}", "sources")
    if validation:
        held = [part for found in validation.values() for one in found for part in one.train + one.held_out]
    else:
        held = [part for found in sources.values() for one in found for part in one.held_out]
    held_out = Parts(held, [-(-(part.tokens - 1) // length) for part in held])
    if len(held_out) == 0:
        raise UserError(
            "hold no tokens to evaluate on: give --data.validation-sources, or prepare them with a larger"
            " --held-out",
            "sources",
        )
    n_bytes = [part.text_bytes for part in held_out.parts]
    about = {"seq_len": length, "weights": config.weights, "tokenizer": digest_of(tokenizer)}
    for group, found in (("sources", sources), ("validation", validation)):
        about[group] = [[one.digest for one in source] for source in found.values()]
    n_shards = sum(len(p.parts) for p in pools.values())
    n_tokens = sum(int(p.tokens.sum()) for p in pools.values())
    return ShardSet(
        tokenizer=tokenizer,
        train=tuple(pools.values()),
        held_out=held_out,
        turns=turns(config.weights or (1,), "weights"),
        seq_len=length,
        eos=eos,
        vocab_size=tokenizer.vocab_size,
        held_out_bytes=None if None in n_bytes else sum(n_bytes),
        fingerprint=hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(),
        source=f"{n_tokens:,} tokens in {n_shards:,} shards of {', '.join(sources)}",
    )
