"""State tracking: parity, modular arithmetic, and the word problems of groups."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Annotated, ClassVar, Literal

from hyena_jax.config.checks import AtLeast, Between
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import require
from hyena_jax.tasks.task import SMALL, Preset, Row, evaluated_lengths, np, register_task, row

MAX_MODULUS = 2**15
PLUS, MINUS, TIMES, EQUALS, FIRST_DIGIT = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class ExpressionConfig(TaskConfig):
    """Base class of the configs of tasks on rows of several lengths, padded with zeros."""

    min_len: Annotated[int, AtLeast(2)] = 3
    """Tokens of the shortest row, with its answer."""
    max_len: int = 40
    """Tokens of the longest row, with its answer; a row has as many inputs, with padding."""
    test_min_len: Annotated[int | None, AtLeast(2)] = 40
    """Shortest row to evaluate on; None takes min_len."""
    test_max_len: int | None = 64
    """Longest row to evaluate on; None takes max_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_len >= self.min_len, "max_len", self.max_len, f"at least min_len={self.min_len}")
        evaluated_lengths(self)


@dataclass(frozen=True)
class ParityConfig(ExpressionConfig):
    """Parity: whether the number of ones so far is odd."""

    n_symbols: ClassVar[int] = 3
    """Padding, zero and one."""

    every_position: bool = True
    """Score the parity so far at every bit; False scores only the whole row's, at its last bit."""


def parity(rng: "np.random.Generator", config: ParityConfig) -> Row:
    """Parity (Grazzi et al. 2024, 2411.12537; automl/unlocking_state_tracking).

    n - 1 bits, n uniform in min_len..max_len, then padding. At every bit the target is the parity so far:

        inputs   1 1 1 0 0 0 0 * *
        target   1 0 1 1 1 1 1 · ·

    With `every_position` off, as published, the last bit alone has a target, the id 1 (even) or 2 (odd). Ids:
    padding 0, zero 1, one 2.
    """
    n = rng.integers(config.min_len, config.max_len + 1)
    bits = rng.integers(2, size=n - 1)
    inputs = np.zeros(config.max_len, np.int64)
    inputs[: n - 1] = bits + 1
    if not config.every_position:
        return row(inputs, [1 + bits.sum() % 2], [n - 2])
    targets = np.zeros(config.max_len, np.int64)
    targets[: n - 1] = np.cumsum(bits) % 2
    return row(inputs, targets, weights=np.arange(config.max_len) < n - 1)


@dataclass(frozen=True)
class ModularArithmeticConfig(ExpressionConfig):
    """Modular arithmetic without brackets: sums, differences and products, products first."""

    min_len: Annotated[int, AtLeast(3)] = 3
    """Tokens of the shortest row: at least a number, `=` and the result."""
    test_min_len: Annotated[int | None, AtLeast(3)] = 40
    """Shortest row to evaluate on; None takes min_len."""
    modulus: Annotated[int, Between(2, MAX_MODULUS)] = 5
    """Modulus m of the digits and the result."""

    @property
    def n_symbols(self) -> int:
        """Padding, `+`, `-`, `*`, `=` and m digits."""
        return 5 + self.modulus


def modular_arithmetic(rng: "np.random.Generator", config: ModularArithmeticConfig) -> Row:
    """Modular arithmetic without brackets (Grazzi et al. 2024, 2411.12537).

    Digits joined by `+`, `-` and `*`, then `=`, where the value modulo m is scored; products come first:

        inputs   0 * 3 - 2 - 0 * 1 = .
        target   · · · · · · · · · 3 ·

    A row has n tokens with its result, n uniform in min_len..max_len, less one if n is even; then padding.
    Ids: padding 0, `+` 1, `-` 2, `*` 3, `=` 4, then the digits.
    """
    n = rng.integers(config.min_len, config.max_len + 1)
    n_digits = (n - 1) // 2
    digits = rng.integers(config.modulus, size=n_digits)
    signs = rng.integers(PLUS, TIMES + 1, size=n_digits)
    inputs = np.zeros(config.max_len, np.int64)
    inputs[0 : 2 * n_digits : 2] = digits + FIRST_DIGIT
    inputs[1 : 2 * n_digits : 2] = signs
    end = 2 * n_digits - 1
    inputs[end] = EQUALS
    total, product = 0, int(digits[0])
    for sign, digit in zip(signs[:-1].tolist(), digits[1:].tolist(), strict=True):
        if sign == TIMES:
            product = product * digit % config.modulus
        else:
            total, product = total + product, digit if sign == PLUS else -digit
    return row(inputs, [FIRST_DIGIT + (total + product) % config.modulus], [end])


@dataclass(frozen=True)
class ModularAdditionConfig(TaskConfig):
    """Modular addition: the sum so far modulo m, which is the word problem of the cyclic group Z_m."""

    modulus: Annotated[int, Between(2, MAX_MODULUS)] = 5
    """Modulus m."""
    seq_len: Annotated[int, AtLeast(1)] = 16
    """Numbers L in a row."""
    test_seq_len: Annotated[int | None, AtLeast(1)] = 32
    """L of the rows to evaluate on; None takes seq_len."""

    @property
    def n_symbols(self) -> int:
        """The residues."""
        return self.modulus


def modular_addition(rng: "np.random.Generator", config: ModularAdditionConfig) -> Row:
    """Modular addition: the sum so far modulo m, the word problem of the cyclic group Z_m.

        inputs   3 4 0 1 2
        target   3 2 2 3 0

    Every position is scored. Parity is m = 2.
    """
    numbers = rng.integers(config.modulus, size=config.seq_len)
    return row(numbers, np.cumsum(numbers) % config.modulus)


@dataclass(frozen=True)
class PermutationWordsConfig(TaskConfig):
    """The word problem of a group of permutations: the product of the elements so far."""

    group: Literal["s3", "s4", "a4", "s5", "a5"] = "s3"
    """All permutations of 3, 4 or 5 objects, or the even ones."""
    seq_len: Annotated[int, AtLeast(1)] = 16
    """Elements L in a row."""
    test_seq_len: Annotated[int | None, AtLeast(1)] = 32
    """L of the rows to evaluate on; None takes seq_len."""

    @property
    def n_symbols(self) -> int:
        """The elements of the group."""
        return len(elements(self.group))


@cache
def elements(group: str) -> tuple[tuple[int, ...], ...]:
    """The permutations of a group in lexicographic order, the identity first: p[j] is where j goes."""

    def is_even(p: tuple[int, ...]) -> bool:
        return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 0

    return tuple(p for p in permutations(range(int(group[1:]))) if group[0] == "s" or is_even(p))


@cache
def table(group: str) -> "np.ndarray":
    """T[a, b] = the element a b, int32 [|G|, |G|], with (p q)[j] = p[q[j]]."""
    listed = elements(group)
    number = {p: i for i, p in enumerate(listed)}
    products = [[number[tuple(p[j] for j in q)] for q in listed] for p in listed]
    found = np.array(products, np.int32)
    found.flags.writeable = False
    return found


def permutation_words(rng: "np.random.Generator", config: PermutationWordsConfig) -> Row:
    """The word problem of a group of permutations (Merrill et al. 2024, 2404.08819; jopetty/word-problem).

    Uniform elements x, and at every position the product so far, y_i = y_{i-1} x_i:

        inputs   021 102 201
        target   021 201 120

    Ids number the permutations of 0..n-1 in lexicographic order (a4, a5: the even ones), the identity is 0.
    The product is (p q)[j] = p[q[j]].
    """
    products = table(config.group)
    inputs = rng.integers(len(products), size=config.seq_len)
    targets = np.empty_like(inputs)
    state = 0
    for i, x in enumerate(inputs.tolist()):
        targets[i] = state = products[state, x]
    return row(inputs, targets)


SOURCE = (
    "Grazzi et al. 2024, 2411.12537, data of its plots; lengths up to 40 / beyond; 2 layers, width 128, AdamW"
    " without decay, 20,000 steps of 256 rows, learning rate 1e-3 after 2,000 steps of warm-up, cosine to a"
    " thousandth, bf16"
)
PUBLISHED = {"test_rows": 8_192, "batch_size": 256, "min_len": 3, "max_len": 40}
TESTED = {"test_min_len": 40, "test_max_len": 256}
WORDS = "jopetty/word-problem; width 512, 1-4 layers, 8 heads, AdamW 1e-4, batch 32, 500 epochs, stop at 0.99"

register_task(
    "parity",
    ParityConfig,
    draw=parity,
    chance=lambda config: 1 / 2,
    symbol=lambda config, i: "*01"[i],
    answer=lambda config, i: str(i if config.every_position else i - 1),
    metric="scaled_accuracy",
    presets={
        "small": Preset(ParityConfig(), f"{SMALL}; every position scored, which is ours"),
        "published": Preset(
            ParityConfig(every_position=False, **PUBLISHED, **TESTED),
            SOURCE,
            "scaled accuracy: Mamba (0,1) 29 / 2, Mamba (-1,1) 100 / 100, DeltaNet beta<1 99 / 6, beta<2"
            " 100 / 100, mLSTM 98 / 8, sLSTM 100 / 100",
        ),
    },
)
register_task(
    "modular_arithmetic",
    ModularArithmeticConfig,
    draw=modular_arithmetic,
    chance=lambda config: 1 / config.modulus,  # as the published scaled accuracy; 0 is a little likelier
    symbol=lambda config, i: ".+-*="[i] if i < FIRST_DIGIT else str(i - FIRST_DIGIT),
    metric="scaled_accuracy",
    presets={
        "small": Preset(ModularArithmeticConfig(), SMALL),
        "published": Preset(
            ModularArithmeticConfig(**PUBLISHED, **TESTED),
            SOURCE,
            "scaled accuracy: Mamba (0,1) 34 / 1, Mamba (-1,1) 99 / 7, DeltaNet beta<1 100 / 15, beta<2"
            " 100 / 61, mLSTM 99 / 12, sLSTM 100 / 13",
        ),
    },
)
register_task(
    "modular_addition",
    ModularAdditionConfig,
    draw=modular_addition,
    chance=lambda config: 1 / config.modulus,
    presets={
        "small": Preset(ModularAdditionConfig(), "ours: the simplest word problem, without published numbers")
    },
)
_S5 = PermutationWordsConfig(group="s5", seq_len=32, test_seq_len=None, batch_size=32)
register_task(
    "permutation_words",
    PermutationWordsConfig,
    draw=permutation_words,
    chance=lambda config: 1 / config.n_symbols,
    symbol=lambda config, i: "".join(map(str, elements(config.group)[i])),
    presets={
        "small": Preset(PermutationWordsConfig(), SMALL),
        "s5": Preset(_S5, f"{WORDS}; the length is ours"),
        "a5": Preset(replace(_S5, group="a5"), f"{WORDS}; the length is ours"),
    },
)
