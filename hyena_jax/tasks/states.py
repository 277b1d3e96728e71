"""State tracking: parity, modular arithmetic, and the word problems of groups."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np

from hyena_jax.config.tasks import (
    ModularAdditionConfig,
    ModularArithmeticConfig,
    ParityConfig,
    PermutationWordsConfig,
)
from hyena_jax.tasks.task import Preset, Row, Task, row

PLUS, MINUS, TIMES, EQUALS, FIRST_DIGIT = 1, 2, 3, 4, 5


def parity(rng: np.random.Generator, config: ParityConfig) -> Row:
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


def modular_arithmetic(rng: np.random.Generator, config: ModularArithmeticConfig) -> Row:
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


def modular_addition(rng: np.random.Generator, config: ModularAdditionConfig) -> Row:
    """Modular addition: the sum so far modulo m, the word problem of the cyclic group Z_m.

        inputs   3 4 0 1 2
        target   3 2 2 3 0

    Every position is scored. Parity is m = 2.
    """
    numbers = rng.integers(config.modulus, size=config.seq_len)
    return row(numbers, np.cumsum(numbers) % config.modulus)


@cache
def elements(group: str) -> tuple[tuple[int, ...], ...]:
    """The permutations of a group in lexicographic order, the identity first: p[j] is where j goes."""
    found = permutations(range(int(group[1:])))
    return tuple(p for p in found if group[0] == "s" or _is_even(p))


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 0


@cache
def table(group: str) -> np.ndarray:
    """T[a, b] = the element a b, int32 [|G|, |G|], with (p q)[j] = p[q[j]]."""
    listed = elements(group)
    number = {p: i for i, p in enumerate(listed)}
    products = [[number[tuple(p[j] for j in q)] for q in listed] for p in listed]
    found = np.array(products, np.int32)
    found.flags.writeable = False
    return found


def permutation_words(rng: np.random.Generator, config: PermutationWordsConfig) -> Row:
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


def _bit(config: ParityConfig, i: int) -> str:
    return "*01"[i]


def _parity_answer(config: ParityConfig, i: int) -> str:
    return str(i if config.every_position else i - 1)


def _arithmetic_symbol(config: ModularArithmeticConfig, i: int) -> str:
    return ".+-*="[i] if i < FIRST_DIGIT else str(i - FIRST_DIGIT)


def _permutation(config: PermutationWordsConfig, i: int) -> str:
    return "".join(map(str, elements(config.group)[i]))


def _one_of(count: Callable) -> Callable[[object], float]:
    return lambda config: 1 / count(config)


def _arithmetic_chance(config: ModularArithmeticConfig) -> float:
    """Any result at random, as the published scaled accuracy takes it; 0 is a little likelier than others."""
    return 1 / config.modulus


SOURCE = (
    "Grazzi et al. 2024, 2411.12537, data of its plots; lengths up to 40 / beyond; 2 layers, width 128, AdamW"
    " without decay, 20,000 steps of 256 rows, learning rate 1e-3 after 2,000 steps of warm-up, cosine to a"
    " thousandth, bf16"
)
PUBLISHED = {"test_rows": 8_192, "batch_size": 256, "min_len": 3, "max_len": 40}
TESTED = {"test_min_len": 40, "test_max_len": 256}
WORDS = "jopetty/word-problem; width 512, 1-4 layers, 8 heads, AdamW 1e-4, batch 32, 500 epochs, stop at 0.99"
SMALL = "the published task at a size for two CPU cores"

PARITY = Task(
    draw=parity,
    chance=lambda config: 1 / 2,
    symbol=_bit,
    answer=_parity_answer,
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
MODULAR_ARITHMETIC = Task(
    draw=modular_arithmetic,
    chance=_arithmetic_chance,
    symbol=_arithmetic_symbol,
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
MODULAR_ADDITION = Task(
    draw=modular_addition,
    chance=_one_of(lambda config: config.modulus),
    presets={
        "small": Preset(ModularAdditionConfig(), "ours: the simplest word problem, without published numbers")
    },
)
_S5 = PermutationWordsConfig(group="s5", seq_len=32, test_seq_len=None, batch_size=32)
PERMUTATION_WORDS = Task(
    draw=permutation_words,
    chance=_one_of(lambda config: config.n_symbols),
    symbol=_permutation,
    presets={
        "small": Preset(PermutationWordsConfig(), SMALL),
        "s5": Preset(_S5, f"{WORDS}; the length is ours"),
        "a5": Preset(replace(_S5, group="a5"), f"{WORDS}; the length is ours"),
    },
)
