"""Configs of synthetic tasks: one class for each task, with the checks of its sizes."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from hyena_jax.config.checks import require_at_least, require_at_most
from hyena_jax.config.data import DataConfig
from hyena_jax.config.models import MAX_POSITIONS, MAX_SYMBOLS
from hyena_jax.config.registry import register
from hyena_jax.errors import require

LOAD = "hyena_jax.data.tasks:load_task"
MAX_DIGITS = 1000
MAX_MOTIF = 8

GROUP_SIZES = {"s3": 6, "s4": 24, "a4": 12, "s5": 120, "a5": 60}
"""Number of elements of each group of permutations."""


@dataclass(frozen=True)
class TaskConfig(DataConfig):
    """Base class of the configs of synthetic tasks, whose rows are drawn from (seed, index)."""

    batch_size: int = field(default=64, kw_only=True)
    """Rows per step, over all devices and accumulation steps."""
    train_rows: int | None = field(default=None, kw_only=True)
    """Rows of a fixed training set, shuffled every epoch; None draws new rows for every step."""
    test_rows: int = field(default=512, kw_only=True)
    """Rows to evaluate on."""
    test_seed: int = field(default=0, kw_only=True)
    """Seed of the rows to evaluate on; the seed of the experiment draws the training rows."""
    disjoint: bool = field(default=True, kw_only=True)
    """No row is in both parts: a hash of a row's inputs keeps an eighth of all rows for the evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "train_rows", "test_rows")
        require(0 <= self.test_seed < 2**32, "test_seed", self.test_seed, "in [0, 2**32)")
        for name in ("seq_len", "test_seq_len", "max_len", "test_max_len", "row_len"):
            if hasattr(self, name):
                require_at_most(MAX_POSITIONS, self, name)
        if hasattr(self, "vocab_size"):
            require_at_most(MAX_SYMBOLS, self, "vocab_size")

    @property
    def n_symbols(self) -> int:
        """Number of ids of the inputs and targets."""
        return self.vocab_size

    def of_test(self) -> Self:
        """The settings of the rows to evaluate on."""
        test_seq_len = getattr(self, "test_seq_len", None)
        return self if test_seq_len is None else replace(self, seq_len=test_seq_len, test_seq_len=None)


def _require_even(config: TaskConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value % 2 == 0, name, value, "even")


@dataclass(frozen=True)
class NextTokenTaskConfig(TaskConfig):
    """Base class of the configs of tasks whose published training predicts every next token."""

    predict_all: bool = field(default=True, kw_only=True)
    """Training predicts every next token, as published; False trains on the scored answers alone."""


@dataclass(frozen=True)
class RecallConfig(NextTokenTaskConfig):
    """Associative recall: pairs of a key and its value, then a key whose value is asked for."""

    vocab_size: int = 12
    """Ids V, with (V - 2) / 2 keys and as many values."""
    seq_len: int = 64
    """Tokens L of the pairs; a row has L + 2 inputs."""
    disjoint: bool = field(default=False, kw_only=True)
    """No row is in both parts; the published code lets test rows occur in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(6, self, "vocab_size")
        require_at_least(2, self, "seq_len")
        _require_even(self, "vocab_size", "seq_len")

    @property
    def n_keys(self) -> int:
        """Keys n = (V - 2) / 2."""
        return (self.vocab_size - 2) // 2


@dataclass(frozen=True)
class MQARConfig(TaskConfig):
    """Multi-query associative recall: all pairs first, then every key once more."""

    vocab_size: int = 64
    """Ids V: keys 1..V/2-1, values V/2..V-1."""
    seq_len: int = 32
    """Inputs L of a row."""
    n_pairs: int = 4
    """Pairs n of a key and a value; n positions are scored."""
    gap_power: float = 0.01
    """Exponent a: gap g has weight (g + 1)^(a - 1)."""
    random_non_queries: bool = False
    """Random ids between the queries instead of zeros."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size", "seq_len")
        require_at_least(1, self, "n_pairs")
        require(self.gap_power > 0, "gap_power", self.gap_power, "above 0")
        _require_even(self, "vocab_size", "seq_len")
        keys = self.vocab_size // 2 - 1
        allowed = f"at most the {keys} keys of vocab_size={self.vocab_size} (or raise vocab_size)"
        require(self.n_pairs <= keys, "n_pairs", self.n_pairs, allowed)
        allowed = f"at most seq_len / 4 = {self.seq_len // 4} (or raise seq_len)"
        require(4 * self.n_pairs <= self.seq_len, "n_pairs", self.n_pairs, allowed)


@dataclass(frozen=True)
class InductionConfig(NextTokenTaskConfig):
    """Induction head: name what followed the marker at its first occurrence."""

    vocab_size: int = 16
    """Ids V: 0 is not used, V - 1 is the marker."""
    seq_len: int = 32
    """Tokens L before the last marker; a row has L + 1 inputs."""
    test_seq_len: int | None = None
    """L of the rows to evaluate on; None takes seq_len."""
    predict_all: bool = field(default=False, kw_only=True)
    """Training predicts every next token, as the published code does; False trains on the answer alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size")
        require_at_least(3, self, "seq_len", "test_seq_len")


@dataclass(frozen=True)
class SelectiveCopyingConfig(TaskConfig):
    """Selective copying: name the data that stand at random places among noise."""

    vocab_size: int = 16
    """Ids V: 0 noise, 1 marker, data 2..V-1."""
    seq_len: int = 32
    """Tokens L before the markers; a row has L + n_data inputs."""
    n_data: int = 4
    """Data ids in a row, and markers behind them."""
    test_seq_len: int | None = None
    """L of the rows to evaluate on; None takes seq_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size")
        require_at_least(1, self, "n_data")
        for name in ("seq_len", "test_seq_len"):
            length = getattr(self, name)
            fits = length is None or length >= self.n_data
            require(fits, name, length, f"at least n_data={self.n_data}")


@dataclass(frozen=True)
class MemorisationConfig(TaskConfig):
    """Memorisation, also called the copying task: name all data once the markers come."""

    vocab_size: int = 18
    """Ids A: 0 noise, data 1..A-2, marker A - 1."""
    n_data: int = 16
    """Data ids M, and markers behind them."""
    n_noise: int = 0
    """Noise ids between the data and the markers."""
    variable: bool = False
    """The data stand at random places among the noise instead of before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size")
        require_at_least(1, self, "n_data")
        require_at_least(0, self, "n_noise")
        inputs, allowed = 2 * self.n_data + self.n_noise, f"at most {MAX_POSITIONS}"
        require(inputs <= MAX_POSITIONS, "2 n_data + n_noise", inputs, allowed)


@dataclass(frozen=True)
class StringTaskConfig(TaskConfig):
    """Base class of the configs of tasks on strings of letters, several of which share a training row."""

    n_letters: int = 8
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
        require(2 <= self.n_letters <= 26, "n_letters", self.n_letters, "in 2..26")
        require(not self.disjoint, "disjoint", True, "False for strings: a row holds several examples")
        for name in ("min_len", "test_min_len"):
            length = getattr(self, name)
            require(length is None or length >= self.least[0], name, length, f"at least {self.least[1]}")
        require(self.max_len >= self.min_len, "max_len", self.max_len, f"at least min_len={self.min_len}")
        least, allowed = self.example_len(self.max_len), "the longest example (or lower max_len)"
        require(self.row_len >= least, "row_len", self.row_len, f"at least {least}, {allowed}")
        self.of_test()

    @property
    def n_symbols(self) -> int:
        """The letters and four signs."""
        return self.n_letters + 4

    @property
    def least(self) -> tuple[int, str]:
        """Letters of the shortest possible string, as a number and in words."""
        return 1, "1"

    def example_len(self, n: int) -> int:
        """Most tokens of an example with a string of n letters."""
        return 2 * n + 3

    def of_test(self) -> Self:
        """The settings of the rows to evaluate on."""
        if self.test_min_len is None and self.test_max_len is None:
            return self
        low = self.min_len if self.test_min_len is None else self.test_min_len
        high = self.max_len if self.test_max_len is None else self.test_max_len
        require(high >= low, "test_max_len", high, f"at least test_min_len={low}")
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
    n_gram: int = 2
    """Letters of the n-gram."""
    answer_len: int | None = None
    """Letters to name; None asks for the rest of the string."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "n_gram", "answer_len")

    @property
    def least(self) -> tuple[int, str]:
        """Letters of the shortest string from which two n-grams can be asked, as a number and in words."""
        least = self.n_gram + (self.answer_len or 0) + 3
        return least, f"n_gram + answer_len + 3 = {least}"

    def example_len(self, n: int) -> int:
        """Most tokens of an example `$g|s|t.` with a string s of n letters."""
        return self.n_gram + n + (self.answer_len or n - self.n_gram) + 4


@dataclass(frozen=True)
class MadRecallConfig(NextTokenTaskConfig):
    """MAD's in-context recall: pairs of a key and its value, of which every repeated key is scored."""

    vocab_size: int = 16
    """Ids V: first keys, then as many values."""
    seq_len: int = 64
    """Tokens L of the pairs; a row has L - 1 inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size", "seq_len")
        _require_even(self, "seq_len")

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
    noise_fraction: float = 0.2
    """Probability that a pair is noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.vocab_size - 3  # which leaves a key and two values
        require(1 <= self.n_noise <= most, "n_noise", self.n_noise, f"in 1..vocab_size - 3 = {most}")
        require(0 <= self.noise_fraction < 1, "noise_fraction", self.noise_fraction, "in [0, 1)")

    @property
    def n_plain(self) -> int:
        """Ids that are keys or values."""
        return self.vocab_size - self.n_noise

    @property
    def noise(self) -> float:
        """Probability of a pair of noise."""
        return self.noise_fraction


@dataclass(frozen=True)
class MadFuzzyRecallConfig(NextTokenTaskConfig):
    """MAD's fuzzy in-context recall: keys and values of one to `motif` different ids in a row."""

    vocab_size: int = 16
    """Ids V: keys, values, and V - 1 for padding on the left."""
    seq_len: int = 64
    """Inputs L of a row."""
    motif: int = 3
    """Most ids of a key or a value; test keys have this many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.motif <= MAX_MOTIF, "motif", self.motif, f"in 1..{MAX_MOTIF}")
        least = 2 * self.motif + 1
        allowed = f"at least 2 motif + 1 = {least}"
        require(self.vocab_size >= least, "vocab_size", self.vocab_size, allowed)
        least = 5 * self.motif + 1
        require(self.seq_len >= least, "seq_len", self.seq_len, f"at least 5 motif + 1 = {least}")


@dataclass(frozen=True)
class MadSelectiveCopyingConfig(TaskConfig):
    """MAD's selective copying: blanks stand before the data, which are named in order at the end."""

    vocab_size: int = 16
    """Ids V: data 0..V-3, blank V - 2, marker V - 1."""
    seq_len: int = 64
    """Inputs L of a row."""
    n_data: int = 8
    """Data ids to copy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(4, self, "vocab_size")
        require_at_least(1, self, "n_data")
        allowed = f"at least 2 n_data + 1 = {2 * self.n_data + 1}"
        require(self.seq_len >= 2 * self.n_data + 1, "seq_len", self.seq_len, allowed)


@dataclass(frozen=True)
class MadCompressionConfig(TaskConfig):
    """MAD's compression: a decoder gives back all ids from the state at the last; for an autoencoder."""

    inputs: ClassVar[str] = "sequences_to_compress"

    vocab_size: int = 16
    """Ids V: data 0..V-2; V - 1 is the last id, where the state is read."""
    seq_len: int = 32
    """Ids L of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(3, self, "vocab_size")
        require_at_least(2, self, "seq_len")


@dataclass(frozen=True)
class MadMemorisationConfig(TaskConfig):
    """MAD's memorisation: one fixed map from keys to values, to be learned by heart."""

    vocab_size: int = 256
    """Ids V: (V - 1) / 2 keys, then the values; V - 1 marks where to answer."""
    seq_len: int = 32
    """Inputs L of a row, L / 2 keys with a marker behind each."""
    train_rows: int | None = field(default=256, kw_only=True)
    """Rows of a fixed training set, shuffled every epoch; None draws new rows for every step."""
    disjoint: bool = field(default=False, kw_only=True)
    """Must be False: the evaluation asks for the facts that were trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(5, self, "vocab_size")
        require_at_least(2, self, "seq_len")
        _require_even(self, "seq_len")
        require(not self.disjoint, "disjoint", True, "False: the evaluation asks for the trained facts")


@dataclass(frozen=True)
class ExpressionConfig(TaskConfig):
    """Base class of the configs of tasks on rows of several lengths, padded with zeros."""

    min_len: int = 3
    """Tokens of the shortest row, with its answer."""
    max_len: int = 40
    """Tokens of the longest row, with its answer; a row has as many inputs, with padding."""
    test_min_len: int | None = 40
    """Shortest row to evaluate on; None takes min_len."""
    test_max_len: int | None = 64
    """Longest row to evaluate on; None takes max_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self.least, self, "min_len", "test_min_len")
        require(self.max_len >= self.min_len, "max_len", self.max_len, f"at least min_len={self.min_len}")
        self.of_test()

    @property
    def least(self) -> int:
        """Tokens of the shortest possible row."""
        return 2

    def of_test(self) -> Self:
        """The settings of the rows to evaluate on."""
        if self.test_min_len is None and self.test_max_len is None:
            return self
        low = self.min_len if self.test_min_len is None else self.test_min_len
        high = self.max_len if self.test_max_len is None else self.test_max_len
        require(high >= low, "test_max_len", high, f"at least test_min_len={low}")
        return replace(self, test_min_len=None, test_max_len=None, min_len=low, max_len=high)


@dataclass(frozen=True)
class ParityConfig(ExpressionConfig):
    """Parity: whether the number of ones so far is odd."""

    every_position: bool = True
    """Score the parity so far at every bit; False scores only the whole row's, at its last bit."""

    @property
    def n_symbols(self) -> int:
        """Padding, zero and one."""
        return 3


@dataclass(frozen=True)
class ModularArithmeticConfig(ExpressionConfig):
    """Modular arithmetic without brackets: sums, differences and products, products first."""

    modulus: int = 5
    """Modulus m of the digits and the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(2 <= self.modulus <= 2**15, "modulus", self.modulus, f"in 2..{2**15}")

    @property
    def least(self) -> int:
        """A number, `=` and the result."""
        return 3

    @property
    def n_symbols(self) -> int:
        """Padding, `+`, `-`, `*`, `=` and m digits."""
        return 5 + self.modulus


@dataclass(frozen=True)
class ModularAdditionConfig(TaskConfig):
    """Modular addition: the sum so far modulo m, which is the word problem of the cyclic group Z_m."""

    modulus: int = 5
    """Modulus m."""
    seq_len: int = 16
    """Numbers L in a row."""
    test_seq_len: int | None = 32
    """L of the rows to evaluate on; None takes seq_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(2 <= self.modulus <= 2**15, "modulus", self.modulus, f"in 2..{2**15}")
        require_at_least(1, self, "seq_len", "test_seq_len")

    @property
    def n_symbols(self) -> int:
        """The residues."""
        return self.modulus


@dataclass(frozen=True)
class PermutationWordsConfig(TaskConfig):
    """The word problem of a group of permutations: the product of the elements so far."""

    group: Literal["s3", "s4", "a4", "s5", "a5"] = "s3"
    """All permutations of 3, 4 or 5 objects, or the even ones."""
    seq_len: int = 16
    """Elements L in a row."""
    test_seq_len: int | None = 32
    """L of the rows to evaluate on; None takes seq_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "seq_len", "test_seq_len")

    @property
    def n_symbols(self) -> int:
        """The elements of the group."""
        return GROUP_SIZES[self.group]


@dataclass(frozen=True)
class MajorityConfig(TaskConfig):
    """Majority: whether more than half of the bits are ones."""

    seq_len: int = 64
    """Inputs L: L - 1 bits, then the id 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(2, self, "seq_len")

    @property
    def n_symbols(self) -> int:
        """Two bits and the end."""
        return 3


@dataclass(frozen=True)
class CountingConfig(TaskConfig):
    """Counting: how often this symbol has occurred so far."""

    n_ids: int = 8
    """Symbols V that are counted."""
    seq_len: int = 64
    """Inputs L of a row."""
    cap: int = 15
    """Largest count C; more count as C."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "n_ids")
        require_at_least(2, self, "seq_len", "cap")  # with 1 there is a single answer
        require_at_most(MAX_SYMBOLS - 1, self, "n_ids", "cap")

    @property
    def n_symbols(self) -> int:
        """The symbols and the counts share their ids."""
        return max(self.n_ids, self.cap + 1)


@dataclass(frozen=True)
class AdditionConfig(TaskConfig):
    """Digit addition: the sum of two numbers of D digits."""

    n_digits: int = 3
    """Digits D of each number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.n_digits <= MAX_DIGITS, "n_digits", self.n_digits, f"in 1..{MAX_DIGITS}")

    @property
    def n_symbols(self) -> int:
        """The digits."""
        return 10


TASK_CONFIGS = {
    "recall": RecallConfig,
    "mqar": MQARConfig,
    "induction": InductionConfig,
    "selective_copying": SelectiveCopyingConfig,
    "copying": CopyingConfig,
    "prefix_ngram": PrefixNgramConfig,
    "memorisation": MemorisationConfig,
    "mad_recall": MadRecallConfig,
    "mad_noisy_recall": MadNoisyRecallConfig,
    "mad_fuzzy_recall": MadFuzzyRecallConfig,
    "mad_selective_copying": MadSelectiveCopyingConfig,
    "mad_compression": MadCompressionConfig,
    "mad_memorisation": MadMemorisationConfig,
    "parity": ParityConfig,
    "modular_arithmetic": ModularArithmeticConfig,
    "modular_addition": ModularAdditionConfig,
    "permutation_words": PermutationWordsConfig,
    "majority": MajorityConfig,
    "counting": CountingConfig,
    "addition": AdditionConfig,
}
for _name, _config_class in TASK_CONFIGS.items():
    register(_name, _config_class, LOAD)
