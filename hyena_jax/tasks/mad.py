"""The six tasks of MAD (2403.17844; athms/mad-lab, mad/data/instances.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar

from hyena_jax.config.checks import AtLeast, Between
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import require
from hyena_jax.tasks.task import (
    SMALL,
    Draw,
    NextTokenTaskConfig,
    Preset,
    Row,
    np,
    register_task,
    require_even,
    row,
)

MAX_MOTIF = 8
MAP_SEED = 12345
"""The published seed of the map from keys to values."""


@dataclass(frozen=True)
class MadRecallConfig(NextTokenTaskConfig):
    """MAD's in-context recall: pairs of a key and its value, of which every repeated key is scored."""

    vocab_size: Annotated[int, AtLeast(4)] = 16
    """Ids V: first keys, then as many values."""
    seq_len: Annotated[int, AtLeast(4)] = 64
    """Tokens L of the pairs; a row has L - 1 inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even(self, "seq_len")

    @property
    def n_plain(self) -> int:
        """Ids that are keys or values."""
        return self.vocab_size

    @property
    def noise(self) -> float:
        """Probability of a pair of noise."""
        return 0.0


@dataclass(frozen=True)
class MadNoisyRecallConfig(MadRecallConfig):
    """MAD's noisy in-context recall: some pairs are noise."""

    vocab_size: int = 32
    """Ids V: keys, values, then noise."""
    n_noise: int = 16
    """Noise ids, the last ones."""
    noise_fraction: Annotated[float, Between(0, 1, "[)")] = 0.2
    """Probability that a pair is noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.vocab_size - 3  # which leaves a key and two values
        require(1 <= self.n_noise <= most, "n_noise", self.n_noise, f"in 1..vocab_size - 3 = {most}")

    @property
    def n_plain(self) -> int:
        return self.vocab_size - self.n_noise

    @property
    def noise(self) -> float:
        return self.noise_fraction


def _scored(tokens: "np.ndarray", is_answer: "np.ndarray") -> Row:
    """Tokens [L + 1] as a row of which only the answers are scored."""
    return row(tokens[:-1], np.where(is_answer, tokens, 0)[1:], weights=is_answer[1:])


def mad_recall(rng: "np.random.Generator", config: MadRecallConfig) -> Row:
    """In-context recall. Pairs of a key and its value until L, the last with a key seen before.

    The value of every repeated key is scored; training predicts every next token (`predict_all`):

        inputs   5 12 2 10 0 8 0 8 1 14 5  12 7 12 1
        target   · ·  · ·  · · 8 · · ·  12 ·  · ·  14

    Ids: keys 0..V/2-1, values V/2..V-1; a row's values are drawn for each key, with repetition.
    """
    half, n_pairs = config.n_plain // 2, config.seq_len // 2
    is_noise = rng.random(n_pairs) < config.noise
    is_noise[[rng.integers(n_pairs - 1), n_pairs - 1]] = False  # a pair to ask for, and the question
    keys = rng.integers(half, size=n_pairs)
    seen = np.unique(keys[:-1][~is_noise[:-1]])
    keys[-1] = seen[rng.integers(len(seen))]
    values = rng.integers(half, config.n_plain, half)
    noise = rng.integers(config.n_plain, max(config.vocab_size, config.n_plain + 1), (n_pairs, 2))
    pairs = np.where(is_noise[:, None], noise, np.stack([keys, values[keys]], axis=1))
    _, first = np.unique(np.where(is_noise, -1, keys), return_index=True)
    is_repeated = ~is_noise
    is_repeated[first] = False
    return _scored(pairs.ravel(), np.stack([np.zeros(n_pairs, bool), is_repeated], axis=1).ravel())


def mad_noisy_recall(rng: "np.random.Generator", config: MadNoisyRecallConfig) -> Row:
    """Noisy in-context recall: as `mad_recall`, but a pair is noise with probability `noise_fraction`.

        inputs   5 10 16 18 6 12 4 13 4  13 5  10 0 11 0
        target   · ·  ·  ·  · ·  · ·  13 ·  10 ·  · ·  11

    Ids: keys and values share the first V - n_noise ids, the last n_noise are noise.
    """
    return mad_recall(rng, config)


@dataclass(frozen=True)
class MadFuzzyRecallConfig(NextTokenTaskConfig):
    """MAD's fuzzy in-context recall: keys and values of one to `motif` different ids in a row."""

    vocab_size: int = 16
    """Ids V: keys, values, and V - 1 for padding on the left."""
    seq_len: int = 64
    """Inputs L of a row."""
    motif: Annotated[int, Between(1, MAX_MOTIF)] = 3
    """Most ids of a key or a value; test keys have this many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 * self.motif + 1
        allowed = f"at least 2 motif + 1 = {least}"
        require(self.vocab_size >= least, "vocab_size", self.vocab_size, allowed)
        least = 5 * self.motif + 1
        require(self.seq_len >= least, "seq_len", self.seq_len, f"at least 5 motif + 1 = {least}")


def _fuzzy_row(rng: "np.random.Generator", config: MadFuzzyRecallConfig, is_test: bool) -> Row:
    most, n_plain = config.motif, config.vocab_size - 1
    half = n_plain // 2

    def draw_key() -> tuple[int, ...]:
        size = most if is_test else rng.integers(1, most + 1)
        return tuple(rng.permutation(half)[:size])

    def draw_value() -> tuple[int, ...]:
        return tuple(half + rng.permutation(n_plain - half)[: rng.integers(1, most + 1)])

    asked, answer = draw_key(), draw_value()
    probe = len(asked) + len(answer)
    end = config.seq_len - probe - 2 * most
    start = rng.integers(max(1, end - 2 * most + 1))  # so early that the asked key always occurs
    values: dict[tuple[int, ...], tuple[int, ...]] = {}
    tokens: list[int] = []
    is_answer: list[bool] = []

    def write(key: tuple[int, ...]) -> None:
        is_answer.extend([False] * len(key) + [key in values] * len(values.get(key, ())))
        if key not in values:
            values[key] = answer if key == asked else draw_value()
            is_answer.extend([False] * len(values[key]))
        tokens.extend((*key, *values[key]))

    while len(tokens) < end:
        write(asked if len(tokens) >= start and asked not in values else draw_key())
    write(asked)
    n_pad = config.seq_len + 1 - len(tokens)
    padded = np.concatenate([np.full(n_pad, n_plain), tokens])
    return _scored(padded, np.concatenate([np.zeros(n_pad, bool), is_answer]))


def mad_fuzzy_recall(rng: "np.random.Generator", config: MadFuzzyRecallConfig) -> Row:
    """Fuzzy in-context recall: keys and values of 1..motif different ids in a row; test keys have `motif`.

    All ids of the value of a repeated key are scored; the row is padded on the left with V - 1:

        inputs   15 15 5 2 0 8 13 11 3 1 4 9 5 2 0 8  13
        target   ·  ·  · · · · ·  ·  · · · · · · 8 13 11

    Ids: keys 0..k-1, values k..V-2, k = (V - 1) / 2. The row's last question asks for a key that occurred (in
    the published code it is absent from rare rows).
    """
    return _fuzzy_row(rng, config, is_test=True)


@dataclass(frozen=True)
class MadSelectiveCopyingConfig(TaskConfig):
    """MAD's selective copying: blanks stand before the data, which are named in order at the end."""

    vocab_size: Annotated[int, AtLeast(4)] = 16
    """Ids V: data 0..V-3, blank V - 2, marker V - 1."""
    seq_len: int = 64
    """Inputs L of a row."""
    n_data: Annotated[int, AtLeast(1)] = 8
    """Data ids to copy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = f"at least 2 n_data + 1 = {2 * self.n_data + 1}"
        require(self.seq_len >= 2 * self.n_data + 1, "seq_len", self.seq_len, allowed)


def mad_selective_copying(rng: "np.random.Generator", config: MadSelectiveCopyingConfig) -> Row:
    """Selective copying: blanks `_` at random places before the data, a marker `?`, and a blank per answer.

        inputs   _ _ _ 11 _ 8 7 _ 3 ? _  _ _ _
        target   · · · ·  · · · · · · 11 8 7 3

    Ids: data 0..V-3, blank V - 2, marker V - 1. Each blank stands before a datum drawn at random, so that the
    last datum is right before the marker.
    """
    n, blank = config.n_data, config.vocab_size - 2
    data = rng.integers(blank, size=n)
    n_blanks = config.seq_len - 2 * n - 1
    n_before = np.bincount(rng.integers(n, size=n_blanks), minlength=n)
    inputs = np.full(config.seq_len, blank)
    inputs[np.cumsum(n_before) + np.arange(n)] = data
    inputs[n + n_blanks] = config.vocab_size - 1
    return row(inputs, data, n + n_blanks + 1 + np.arange(n))


@dataclass(frozen=True)
class MadCompressionConfig(TaskConfig):
    """MAD's compression: a decoder gives back all ids from the state at the last; for an autoencoder."""

    inputs: ClassVar[str] = "sequences_to_compress"

    vocab_size: Annotated[int, AtLeast(3)] = 16
    """Ids V: data 0..V-2; V - 1 is the last id, where the state is read."""
    seq_len: Annotated[int, AtLeast(2)] = 32
    """Ids L of a row."""


def mad_compression(rng: "np.random.Generator", config: MadCompressionConfig) -> Row:
    """Compression: an autoencoder reads all ids, and gives all of them back from its state at the last id.

        inputs   12 9 7 4 4 0 1 =
        target   12 9 7 4 4 0 1 =

    Ids: data 0..V-2, last id V - 1. For the model `autoencoder`, not for a language model, which would copy
    each id where it reads it: the published decoder (two dense layers with GELU after sinusoidal positions)
    sees the last state alone.
    """
    tokens = np.append(rng.integers(config.vocab_size - 1, size=config.seq_len - 1), config.vocab_size - 1)
    return row(tokens, tokens)


@dataclass(frozen=True)
class MadMemorisationConfig(TaskConfig):
    """MAD's memorisation: one fixed map from keys to values, to be learned by heart."""

    vocab_size: Annotated[int, AtLeast(5)] = 256
    """Ids V: (V - 1) / 2 keys, then the values; V - 1 marks where to answer."""
    seq_len: Annotated[int, AtLeast(2)] = 32
    """Inputs L of a row, L / 2 keys with a marker behind each."""
    train_rows: int | None = field(default=256, kw_only=True)
    """Rows of a fixed training set, shuffled every epoch; None draws new rows for every step."""
    disjoint: bool = field(default=False, kw_only=True)
    """Must be False: the evaluation asks for the facts that were trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even(self, "seq_len")
        require(not self.disjoint, "disjoint", True, "False: the evaluation asks for the trained facts")


@cache
def value_of_key(vocab_size: int) -> "np.ndarray":
    """The value of each key, int [keys]: keys and values shuffled by the published generator and seed."""
    rng = np.random.default_rng(MAP_SEED)
    half = (vocab_size - 1) // 2
    keys, values = list(range(half)), list(range(half, vocab_size - 1))
    rng.shuffle(keys)
    rng.shuffle(values)
    found = np.zeros(half, np.int32)
    found[keys] = values[:half]
    found.flags.writeable = False
    return found


def mad_memorisation(rng: "np.random.Generator", config: MadMemorisationConfig) -> Row:
    """Memorisation: keys, and behind each a marker `?` where its value is to be named.

        inputs   56 ?   92 ?
        target   ·  197 ·  135

    The map is the same in all rows, training and test. Ids: keys 0..k-1, values k..V-2, k = (V - 1) / 2,
    marker V - 1.
    """
    values = value_of_key(config.vocab_size)
    keys = rng.integers(len(values), size=config.seq_len // 2)
    inputs = np.stack([keys, np.full(len(keys), config.vocab_size - 1)], axis=1).ravel()
    return row(inputs, values[keys], 1 + 2 * np.arange(len(keys)))


def _recall_chance(config: MadRecallConfig) -> float:
    """Any of the values."""
    return 1 / (config.n_plain - config.n_plain // 2)


# MAD's baseline and its grid of difficulties, one option changed at a time (configs/tasks of the repository).
BASE = {"train_rows": 12_800, "test_rows": 1_280, "batch_size": 128}
SOURCE = (
    "Poli et al. 2024, 2403.17844; mixer, SwiGLU, mixer, SwiGLU of width 128, 200 epochs, cosine to 1e-6,"
    " bf16, learning rate 1e-4, 5e-4, 1e-3 x decay 0, 0.1; macro accuracy"
)
TABLE = "mean over the grid (2406.06484, the first five from 2403.17844)"
MODELS = ("Transformer", "Hyena", "multi-head Hyena", "Mamba", "GLA", "DeltaNet")
SIZES = (2, 4, 8)
ROWS = (6400, 3200, 1600, 800)
NOISE = (0.4, 0.6, 0.8)


def _register(
    name: str,
    draw: Draw,
    chance: Callable[[Any], float],
    base: Any,
    percent: tuple[float, ...],
    others: Mapping[str, Any] | None = None,
    lengths: tuple[int, ...] = SIZES,
    **options: Any,
) -> None:
    """Registers a task and its presets; `percent` is the published accuracy of each of MODELS."""
    published = f"{TABLE}: " + ", ".join(f"{m} {p:g}" for m, p in zip(MODELS, percent, strict=True))
    varied = {
        "baseline": base,
        **{f"v{k * base.vocab_size}": replace(base, vocab_size=k * base.vocab_size) for k in SIZES},
        **{f"l{k * base.seq_len}": replace(base, seq_len=k * base.seq_len) for k in lengths},
        **({f"rows{n}": replace(base, train_rows=n) for n in ROWS} if base.train_rows == 12_800 else {}),
        **(others or {}),
    }
    presets = {"small": Preset(type(base)(), SMALL)}
    presets |= {name: Preset(config, SOURCE, published) for name, config in varied.items()}
    register_task(name, type(base), draw, chance, presets=presets, metric="macro_accuracy", **options)


_register(
    "mad_recall",
    mad_recall,
    _recall_chance,
    MadRecallConfig(vocab_size=16, seq_len=128, **BASE),
    (94.1, 81.7, 99.0, 90.4, 80.8, 100),
    shows_positions=False,
)
_NOISY = MadNoisyRecallConfig(vocab_size=32, seq_len=128, **BASE)
_register(
    "mad_noisy_recall",
    mad_noisy_recall,
    _recall_chance,
    _NOISY,
    (86.8, 78.8, 98.6, 90.1, 81.6, 100),
    {f"noise{int(100 * f)}": replace(_NOISY, noise_fraction=f) for f in NOISE},
    symbol=lambda config, i: f"~{i}" if i >= config.n_plain else str(i),
    shows_positions=False,
)
_register(
    "mad_fuzzy_recall",
    mad_fuzzy_recall,
    lambda config: 1 / (config.vocab_size - 1 - (config.vocab_size - 1) // 2),  # any id of the values
    MadFuzzyRecallConfig(vocab_size=16, seq_len=128, **BASE),
    (29.8, 7.9, 14.4, 6.7, 6.9, 35.7),
    draw_train=partial(_fuzzy_row, is_test=False),
    symbol=lambda config, i: {config.vocab_size - 1: "*"}.get(i, str(i)),
    shows_positions=False,
)
_SELECTIVE = MadSelectiveCopyingConfig(vocab_size=16, seq_len=256, n_data=16, **BASE)
_register(
    "mad_selective_copying",
    mad_selective_copying,
    lambda config: 1 / (config.vocab_size - 2),
    _SELECTIVE,
    (99.6, 93.1, 93.0, 86.3, 88.6, 100),
    {f"data{n}": replace(_SELECTIVE, n_data=n) for n in (32, 64, 96)},
    lengths=(2, 4),
    symbol=lambda config, i: {config.vocab_size - 2: "_", config.vocab_size - 1: "?"}.get(i, str(i)),
)
_register(
    "mad_compression",
    mad_compression,
    # Any id where data stand; the last id is known.
    lambda config: ((config.seq_len - 1) / (config.vocab_size - 1) + 1) / config.seq_len,
    MadCompressionConfig(vocab_size=16, seq_len=32, **BASE),
    (51.6, 45.2, 44.8, 52.7, 38.8, 42.2),
    symbol=lambda config, i: {config.vocab_size - 1: "="}.get(i, str(i)),
)
_MAP = MadMemorisationConfig(vocab_size=256, seq_len=32, train_rows=256, test_rows=1_280, batch_size=128)
_register(
    "mad_memorisation",
    mad_memorisation,
    lambda config: 1 / len(value_of_key(config.vocab_size)),  # any of the map's values
    _MAP,
    (85.2, 89.5, 89.4, 89.5, 63.3, 52.8),
    {f"v{size}": replace(_MAP, vocab_size=size) for size in (512, 1024, 2048, 4096, 8192)},
    lengths=(),
    symbol=lambda config, i: {config.vocab_size - 1: "?"}.get(i, str(i)),
    shows_positions=False,
)
