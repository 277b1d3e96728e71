"""Strings of letters: copying, and looking up an n-gram (2402.01032)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Self

from hyena_jax.config.checks import AtLeast, Between
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import UserError, require
from hyena_jax.tasks.task import SMALL, Preset, Row, evaluated_lengths, np, register_task, row

# Strings that are tried until one has an n-gram that occurs once; the published code tries 10 and fails.
MAX_TRIES = 1000


@dataclass(frozen=True)
class StringTaskConfig(TaskConfig):
    """Base class of the configs of tasks on strings of letters, several of which share a training row."""

    n_letters: Annotated[int, Between(2, 26)] = 8
    """Letters of the alphabet, ids 0..n-1, before `$`, `|`, `.` and `*`."""
    min_len: int = 3
    """Letters of the shortest string."""
    max_len: int = 8
    """Letters of the longest string."""
    test_min_len: int | None = None
    """Shortest string to evaluate on; None takes min_len."""
    test_max_len: int | None = None
    """Longest string to evaluate on; None takes max_len."""
    row_len: int = 40
    """Tokens of a training row, which is packed with examples; a test row holds one example."""
    disjoint: bool = field(default=False, kw_only=True)
    """Must be False: a training row holds several examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.disjoint, "disjoint", True, "False for strings: a row holds several examples")
        for name in ("min_len", "test_min_len"):
            length = getattr(self, name)
            require(length is None or length >= self.least[0], name, length, f"at least {self.least[1]}")
        require(self.max_len >= self.min_len, "max_len", self.max_len, f"at least min_len={self.min_len}")
        least, allowed = self.example_len(self.max_len), "the longest example (or lower max_len)"
        require(self.row_len >= least, "row_len", self.row_len, f"at least {least}, {allowed}")
        self.for_evaluation()

    @property
    def n_symbols(self) -> int:
        """The letters and four signs."""
        return self.n_letters + 4

    @property
    def least(self) -> tuple[int, str]:
        """Letters of the shortest possible string, as a number and in words."""
        return 1, "1"

    def answer_letters(self, n: int) -> int:
        """Most letters of the answer, of a string of n letters."""
        return n

    def example_len(self, n: int) -> int:
        """Most tokens of an example with a string of n letters: the string, the answer, `$`, `|` and `.`"""
        return n + self.answer_letters(n) + 3

    def for_evaluation(self) -> Self:
        """The settings of the rows to evaluate on."""
        if self.test_min_len is None and self.test_max_len is None:
            return self
        low, high = evaluated_lengths(self)
        row_len = max(self.row_len, self.example_len(high))
        return replace(self, test_min_len=None, test_max_len=None, min_len=low, max_len=high, row_len=row_len)


@dataclass(frozen=True)
class CopyingConfig(StringTaskConfig):
    """Copying: repeat a string of letters."""


@dataclass(frozen=True)
class PrefixNgramConfig(StringTaskConfig):
    """Prefix n-gram: name what follows an n-gram in the string behind it."""

    min_len: int = 6
    """Letters of the shortest string."""
    n_gram: Annotated[int, AtLeast(1)] = 2
    """Letters of the n-gram."""
    answer_len: Annotated[int | None, AtLeast(1)] = None
    """Letters to name; None asks for the rest of the string."""

    @property
    def least(self) -> tuple[int, str]:
        """Letters of the shortest string from which two n-grams can be asked, as a number and in words."""
        least = self.n_gram + (self.answer_len or 0) + 3
        return least, f"n_gram + answer_len + 3 = {least}"

    def answer_letters(self, n: int) -> int:
        return self.answer_len or n - self.n_gram

    def example_len(self, n: int) -> int:
        """Most tokens of an example `$g|s|t.`: the n-gram and another `|` come in addition."""
        return super().example_len(n) + self.n_gram + 1


Example = Callable[["np.random.Generator", StringTaskConfig], "tuple[np.ndarray, int]"]
"""(rng, config) -> the tokens of an example, and how many of them, at its end, are its answer."""


def _string(rng: "np.random.Generator", config: StringTaskConfig) -> "np.ndarray":
    return rng.integers(config.n_letters, size=rng.integers(config.min_len, config.max_len + 1))


def _copy_example(rng: "np.random.Generator", config: CopyingConfig) -> "tuple[np.ndarray, int]":
    """`$s|s.`"""
    letters, n = _string(rng, config), config.n_letters
    return np.concatenate([[n], letters, [n + 1], letters, [n + 2]]), len(letters) + 1


def _ngram_example(rng: "np.random.Generator", config: PrefixNgramConfig) -> "tuple[np.ndarray, int]":
    """`$g|s|t.`"""
    n, size, answer_len = config.n_letters, config.n_gram, config.answer_len
    for _ in range(MAX_TRIES):
        letters = _string(rng, config)
        grams = [tuple(letters[i : i + size]) for i in range(len(letters) - size - (answer_len or 0) - 1)]
        if 1 in Counter(grams).values():
            break
    else:
        raise UserError(
            f"must be such that some {size}-gram occurs once, got {size} with n_letters={n},"
            f" min_len={config.min_len}",
            "n_gram",
        )
    # As published: all listed n-grams but the last, not only those that occur once.
    gram = grams[rng.integers(len(grams) - 1)]
    rest = letters[grams.index(gram) + size :]
    answer = rest if answer_len is None else rest[:answer_len]
    signs = [n], gram, [n + 1], letters, [n + 1], answer, [n + 2]
    return np.concatenate(signs), len(answer) + 1


def _packed(make: Example, rng: "np.random.Generator", config: StringTaskConfig) -> Row:
    """A training row full of examples; the last, cut off, is not scored."""
    tokens, scored = np.zeros(0, np.int64), np.zeros(0)
    while len(tokens) < config.row_len:
        example, n_answer = make(rng, config)
        is_whole = len(tokens) + len(example) <= config.row_len
        is_answer = np.arange(len(example)) >= len(example) - n_answer
        tokens = np.concatenate([tokens, example])
        scored = np.concatenate([scored, is_answer * float(is_whole)])
    tokens, scored = tokens[: config.row_len], scored[: config.row_len]
    return row(tokens[:-1], tokens[1:], weights=scored[1:])


def _single(make: Example, rng: "np.random.Generator", config: StringTaskConfig) -> Row:
    """A test row of one example, padded with `*`."""
    example, n_answer = make(rng, config)
    tokens = np.full(config.example_len(config.max_len), config.n_letters + 3)
    tokens[: len(example)] = example
    slots = np.arange(config.answer_letters(config.max_len) + 1)  # with the full stop
    is_answer = slots < n_answer
    positions = np.where(is_answer, len(example) - n_answer - 1 + slots, 0)
    targets = np.where(is_answer, tokens[positions + 1], 0)
    return row(tokens[:-1], targets, positions, is_answer)


def copying(rng: "np.random.Generator", config: CopyingConfig) -> Row:
    """Copying (Jelassi et al. 2024, 2402.01032; sjelassi/transformers_ssm_copy, data_utils.py).

    `$s|s.`: a string of uniform letters and of uniform length, and the string again, which is scored with the
    full stop behind it:

        inputs   $ c a b | c a b * *
        target   · · · · c a b . · ·

    A training row of `row_len` tokens is packed with examples, of which the last, cut off, is not scored.
    Ids: letters 0..n-1, then `$`, `|`, `.` and the padding `*`.
    """
    return _single(_copy_example, rng, config)


def prefix_ngram(rng: "np.random.Generator", config: PrefixNgramConfig) -> Row:
    """Prefix n-gram lookup (Jelassi et al. 2024, 2402.01032; sjelassi/transformers_ssm_copy, data_utils.py).

    `$g|s|t.`: an n-gram g, a string s, and what follows the first g in s, which is scored with the full stop:

        inputs   $ c a | b c a d e | d e *
        target   · · · · · · · · · d e . ·

    g is drawn from the n-grams that end early enough, in a string in which at least one of them occurs once.
    Training rows and ids as in `copying`.
    """
    return _single(_ngram_example, rng, config)


def _symbol(config: StringTaskConfig, i: int) -> str:
    n = config.n_letters
    return "abcdefghijklmnopqrstuvwxyz"[i] if i < n else "$|.*"[i - n]


def _chance_of(counts: dict[int, float], n_letters: int) -> float:
    """The best guess at each place of the answer: a letter or the full stop.

    `counts` are the probabilities of each number of letters of the answer.
    """
    right = total = 0.0
    for place in range(max(counts) + 1):
        ends = counts.get(place, 0.0)
        goes_on = sum(p for n, p in counts.items() if n > place)
        right += max(ends, goes_on / n_letters)
        total += ends + goes_on
    return right / total


def _copying_chance(config: CopyingConfig) -> float:
    lengths = range(config.min_len, config.max_len + 1)
    return _chance_of({n: 1 / len(lengths) for n in lengths}, config.n_letters)


def _ngram_chance(config: PrefixNgramConfig) -> float:
    """A letter at random, as if no letter were likelier than another; a full stop only where it is certain.

    The rare n-grams that occur twice are left out.
    """
    lengths = range(config.min_len, config.max_len + 1)
    if config.answer_len is not None:
        return _chance_of({config.answer_len: 1.0}, config.n_letters)
    counts: dict[int, float] = {}
    for n in lengths:
        starts = range(n - config.n_gram - 2)  # all but the last of those that end early enough
        for start in starts:
            left = n - start - config.n_gram
            counts[left] = counts.get(left, 0.0) + 1 / len(lengths) / len(starts)
    return _chance_of(counts, config.n_letters)


SOURCE = (
    "Jelassi et al. 2024, 2402.01032; 12 layers, width 1024, 16 heads, AdamW 1e-5, decay 0.1, linear after"
    " 100 steps of warm-up, 2,000 steps an epoch"
)
PUBLISHED = {"n_letters": 26, "max_len": 20, "row_len": 220, "batch_size": 8}
register = partial(register_task, symbol=_symbol, metric="sequence_accuracy")
register(
    "copying",
    CopyingConfig,
    draw=copying,
    draw_train=partial(_packed, _copy_example),
    chance=_copying_chance,
    presets={
        "small": Preset(CopyingConfig(), SMALL),
        "published": Preset(CopyingConfig(min_len=5, **PUBLISHED), SOURCE),
    },
)
SOURCE_OF_NGRAMS = f"{SOURCE}; lengths from 6, since 5 letters are too few for a 3-gram"
register(
    "prefix_ngram",
    PrefixNgramConfig,
    draw=prefix_ngram,
    draw_train=partial(_packed, _ngram_example),
    chance=_ngram_chance,
    presets={
        "small": Preset(PrefixNgramConfig(), SMALL),
        "published": Preset(PrefixNgramConfig(min_len=6, n_gram=3, **PUBLISHED), SOURCE_OF_NGRAMS),
    },
)
