"""Recall from the context: associative recall, multi-query associative recall, the induction head."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from hyena_jax.config.checks import Above, AtLeast
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import require
from hyena_jax.tasks.task import (
    SMALL,
    NextTokenTaskConfig,
    Preset,
    Row,
    letter,
    np,
    register_task,
    require_even,
    row,
)


@dataclass(frozen=True)
class RecallConfig(NextTokenTaskConfig):
    """Associative recall: pairs of a key and its value, then a key whose value is asked for."""

    vocab_size: Annotated[int, AtLeast(6)] = 12
    """Ids V, with (V - 2) / 2 keys and as many values."""
    seq_len: Annotated[int, AtLeast(2)] = 64
    """Tokens L of the pairs; a row has L + 2 inputs."""
    disjoint: bool = field(default=False, kw_only=True)
    """No row is in both parts; the published code lets test rows occur in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even(self, "vocab_size", "seq_len")

    @property
    def n_keys(self) -> int:
        """Keys n = (V - 2) / 2."""
        return (self.vocab_size - 2) // 2


def recall(rng: "np.random.Generator", config: RecallConfig) -> Row:
    """Associative recall (HazyResearch/safari, src/dataloaders/synthetics.py; Poli et al. 2023, 2302.10866).

    Every key has a value in this row. L / 2 pairs, with keys drawn with repetition, then `=>`, a key that
    occurred, and its value, which is scored:

        inputs   c h a e f i c h d i =>  a
        target   · · · · · · · · · · ·   e

    Ids: 0 is not used, keys 1..n, values n + 1..2n, `=>` V - 1, n = (V - 2) / 2. Training predicts every next
    token (`predict_all`). Published rows are unique within a part, and test rows may occur in training.
    """
    n, n_pairs = config.n_keys, config.seq_len // 2
    values = rng.integers(n + 1, 2 * n + 1, n)  # drawn for every key: two keys may share one
    keys = rng.integers(n, size=n_pairs)
    asked = rng.choice(np.unique(keys))
    pairs = np.stack([keys + 1, values[keys]], axis=1).ravel()
    inputs = np.concatenate([pairs, [config.vocab_size - 1, asked + 1]])
    return row(inputs, [values[asked]], [len(inputs) - 1])


@dataclass(frozen=True)
class MQARConfig(TaskConfig):
    """Multi-query associative recall: all pairs first, then every key once more."""

    vocab_size: Annotated[int, AtLeast(4)] = 64
    """Ids V: keys 1..V/2-1, values V/2..V-1."""
    seq_len: Annotated[int, AtLeast(4)] = 32
    """Inputs L of a row."""
    n_pairs: Annotated[int, AtLeast(1)] = 4
    """Pairs n of a key and a value; n positions are scored."""
    gap_power: Annotated[float, Above(0)] = 0.01
    """Exponent a: gap g has weight (g + 1)^(a - 1)."""
    random_non_queries: bool = False
    """Random ids between the queries instead of zeros."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even(self, "vocab_size", "seq_len")
        keys = self.vocab_size // 2 - 1
        allowed = f"at most the {keys} keys of vocab_size={self.vocab_size} (or raise vocab_size)"
        require(self.n_pairs <= keys, "n_pairs", self.n_pairs, allowed)
        allowed = f"at most seq_len / 4 = {self.seq_len // 4} (or raise seq_len)"
        require(4 * self.n_pairs <= self.seq_len, "n_pairs", self.n_pairs, allowed)


def mqar(rng: "np.random.Generator", config: MQARConfig) -> Row:
    """Multi-query associative recall (Arora et al. 2023, 2312.04927; HazyResearch/zoology, multiquery_ar.py).

    n pairs of a key and its value, all different, then every key once more; the target at such a query is
    the key's value. The rest is 0, or random ids:

        inputs   3 10 5 7 5 0 0 0 0 0 0 0 0 0 3  0
        target   · ·  · · 7 · · · · · · · · · 10 ·

    Query j stands at 2n + 2g_j, the gaps g drawn without repetition from 0..(L - 2n) / 2 - 1 with weights
    (g + 1)^(a - 1): early gaps are likeliest. Ids: keys 1..V/2-1, values V/2..V-1.
    """
    half, n, length = config.vocab_size // 2, config.n_pairs, config.seq_len
    keys = 1 + rng.permutation(half - 1)[:n]
    values = half + rng.permutation(half)[:n]
    # The order of log(weight) + Gumbel noise is a sequential draw without repetition.
    weight = (config.gap_power - 1) * np.log(np.arange(1, (length - 2 * n) // 2 + 1))
    gaps = np.argsort(-(weight + rng.gumbel(size=len(weight))))[:n]
    inputs = np.zeros(length, np.int32)
    inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2] = keys, values
    inputs[2 * n + 2 * gaps] = keys
    if config.random_non_queries:
        inputs = np.where(inputs == 0, rng.integers(config.vocab_size, size=length), inputs)
    order = np.argsort(gaps)
    return row(inputs, values[order], 2 * n + 2 * gaps[order])


@dataclass(frozen=True)
class InductionConfig(NextTokenTaskConfig):
    """Induction head: name what followed the marker at its first occurrence."""

    vocab_size: Annotated[int, AtLeast(4)] = 16
    """Ids V: 0 is not used, V - 1 is the marker."""
    seq_len: Annotated[int, AtLeast(3)] = 32
    """Tokens L before the last marker; a row has L + 1 inputs."""
    test_seq_len: Annotated[int | None, AtLeast(3)] = None
    """L of the rows to evaluate on; None takes seq_len."""
    predict_all: bool = field(default=False, kw_only=True)
    """Training predicts every next token, as the published code does; False trains on the answer alone."""


def induction(rng: "np.random.Generator", config: InductionConfig) -> Row:
    """Induction head (HazyResearch/safari; also Gu & Dao 2023, 2312.00752, section 4.1.2).

    L random ids with `=>` at one random place, `=>` again, and then what followed the first `=>`:

        inputs   5 => 7 7 2 9 1 3 2 4 =>
        target   · ·  · · · · · · · · 7

    Ids: 0 is not used, `=>` V - 1. The first `=>` is at 0..L-3.
    """
    marker, length = config.vocab_size - 1, config.seq_len
    inputs = rng.integers(1, marker, length + 2)[: length + 1]  # the drawn number of the answer is not used
    place = rng.integers(length - 2)
    inputs[[place, length]] = marker
    return row(inputs, [inputs[place + 1]], [length])


HYENA = "Poli et al. 2023, 2302.10866"
SAFARI = RecallConfig(train_rows=2000, batch_size=32, vocab_size=30)
HYENA_RECIPE = (
    "2 layers, width 64, MLP x4, AdamW (0.9, 0.98) 5e-4, decay 0.1, 200 epochs, cosine after 10 epochs"
)
BY_LENGTH = {
    "l30k": (
        30_000,
        "Hyena 100, FlashTransformer 32.4, GSS 5.3, H3 8.4, AFT-conv 2.3, RWKV 12.4",
    ),
    "l64k": (
        2**16,
        "Hyena 100, FlashTransformer 26.7, GSS 2.1, H3 4.3, AFT-conv 1.2, RWKV 6.5",
    ),
    "l131k": (
        2**17,
        "Hyena 97.2, GSS 0.1, H3 0.6, AFT-conv 0.8, RWKV 2.3; filters in Hyena: implicit 97.2, CKConv 14.3,"
        " H3 0.6, transfer function 0.5, free taps 0.5, FNO 0.3",
    ),
}
BY_SIZE = {
    10: "Conv1d 32, AFT 55, H3 92, Transformer 100, Hyena 100",
    20: "Conv1d 11, AFT 21, H3 60, Transformer 100, Hyena 100",
    30: "Conv1d 10, AFT 12, H3 13, Transformer 92, Hyena 98",
    40: "Conv1d 8, AFT 10, H3 10, Transformer 82, Hyena 85",
}
register_task(
    "recall",
    RecallConfig,
    draw=recall,
    chance=lambda config: 1 / config.n_keys,
    symbol=lambda config, i: {0: ".", config.vocab_size - 1: "=>"}.get(i, letter(i - 1)),
    shows_positions=False,
    presets={
        "small": Preset(RecallConfig(), SMALL),
        **{
            f"v{size}_l2048": Preset(
                replace(SAFARI, vocab_size=size, seq_len=2048), f"{HYENA}; {HYENA_RECIPE}", numbers
            )
            for size, numbers in BY_SIZE.items()
        },
        **{
            name: Preset(replace(SAFARI, seq_len=length), f"{HYENA}; {HYENA_RECIPE}", numbers)
            for name, (length, numbers) in BY_LENGTH.items()
        },
    },
)
ZOOLOGY = (
    "Arora et al. 2023, 2312.04927, figure 2; 2 layers without MLP, width 64, 128, 256, 512, AdamW, decay"
    " 0.1, learning rate 4 of logspace(-4, -2), cosine, 64 epochs"
)
register_task(
    "mqar",
    MQARConfig,
    draw=mqar,
    chance=lambda config: 2 / config.vocab_size,
    presets={
        "small": Preset(MQARConfig(), SMALL),
        **{
            f"l{length}": Preset(
                MQARConfig(
                    vocab_size=8192,
                    seq_len=length,
                    n_pairs=pairs,
                    train_rows=100_000,
                    test_rows=3_000,
                    batch_size=rows,
                ),
                ZOOLOGY,
            )
            for length, pairs, rows in ((64, 4, 512), (128, 8, 512), (256, 16, 256))
        },
    },
)
register_task(
    "induction",
    InductionConfig,
    draw=induction,
    chance=lambda config: 1 / (config.vocab_size - 2),
    symbol=lambda config, i: {config.vocab_size - 1: "=>"}.get(i, str(i)),
    shows_positions=False,
    presets={
        "small": Preset(InductionConfig(), SMALL),
        "safari": Preset(
            InductionConfig(vocab_size=10, seq_len=10, train_rows=5000, test_rows=500, predict_all=True),
            "HazyResearch/safari; width 32, cosine, 400 epochs; V and L of its example",
        ),
        "mamba": Preset(
            InductionConfig(vocab_size=16, seq_len=256),
            "Gu & Dao 2023, 2312.00752; also De et al. 2024, 2402.19427: 5 blocks, width 64, window 128;"
            " --data.test-seq-len tests other lengths",
            "trained at 256, tested at 64 .. 1,048,576: Mamba 100 at all lengths",
        ),
    },
)
