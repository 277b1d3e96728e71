"""Counting and adding: majority, counting, digit addition."""

from dataclasses import dataclass
from math import comb
from typing import Annotated, ClassVar

from hyena_jax.config.checks import AtLeast, AtMost, Between
from hyena_jax.config.models import MAX_SYMBOLS
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.tasks.task import Preset, Row, letter, np, register_task, row

MAX_DIGITS = 1000


@dataclass(frozen=True)
class MajorityConfig(TaskConfig):
    """Majority: whether more than half of the bits are ones."""

    n_symbols: ClassVar[int] = 3
    """Two bits and the end."""

    seq_len: Annotated[int, AtLeast(2)] = 64
    """Inputs L: L - 1 bits, then the id 2."""


def majority(rng: "np.random.Generator", config: MajorityConfig) -> Row:
    """Majority (HazyResearch/zoology, zoology/data/circuits.py).

    L - 1 random bits, then the id 2, where the answer is scored: 1 if more than half of the bits are ones:

        inputs   1 1 1 0 0 0 0 0 0 ?
        target   · · · · · · · · · 0

    A tie, possible if L is odd, counts as 0.
    """
    n = config.seq_len - 1
    bits = rng.integers(2, size=n)
    return row(np.append(bits, 2), [int(2 * bits.sum() > n)], [n])


@dataclass(frozen=True)
class CountingConfig(TaskConfig):
    """Counting: how often this symbol has occurred so far."""

    n_ids: Annotated[int, AtLeast(1), AtMost(MAX_SYMBOLS - 1)] = 8
    """Symbols V that are counted."""
    seq_len: Annotated[int, AtLeast(2)] = 64
    """Inputs L of a row."""
    cap: Annotated[int, AtLeast(2), AtMost(MAX_SYMBOLS - 1)] = 15
    """Largest count C; more count as C."""

    @property
    def n_symbols(self) -> int:
        """The symbols and the counts share their ids."""
        return max(self.n_ids, self.cap + 1)


def counting(rng: "np.random.Generator", config: CountingConfig) -> Row:
    """Counting: at every position, how often its symbol has occurred so far, at most C (`cap`).

        inputs   e d c b b a a a a e
        target   1 1 1 1 2 1 2 3 4 2

    The symbols are drawn uniformly from V. A smoke test of ours, without published numbers.
    """
    symbols = rng.integers(config.n_ids, size=config.seq_len)
    order = np.argsort(symbols, kind="stable")
    ranked = symbols[order]
    counts = np.empty(config.seq_len, np.int64)
    counts[order] = np.arange(config.seq_len) - np.searchsorted(ranked, ranked) + 1
    return row(symbols, np.minimum(counts, config.cap))


@dataclass(frozen=True)
class AdditionConfig(TaskConfig):
    """Digit addition: the sum of two numbers of D digits."""

    n_symbols: ClassVar[int] = 10
    """The digits."""

    n_digits: Annotated[int, Between(1, MAX_DIGITS)] = 3
    """Digits D of each number."""


def addition(rng: "np.random.Generator", config: AdditionConfig) -> Row:
    """Digit addition (Poli et al. 2023, 2302.10866, appendix C.1).

    Two numbers of D digits and their sum of D + 1 digits, most significant first, without separators; the
    digits of the sum are scored, each predicted from the digit before it. 850 + 636 = 1486:

        inputs   8 5 0 6 3 6 1 4 8
        target   · · · · · 1 4 8 6
    """
    n = config.n_digits
    digits = rng.integers(10, size=(2, n))
    total, carry = np.empty(n + 1, np.int64), 0
    for place in reversed(range(n)):
        carry, total[place + 1] = divmod(int(digits[:, place].sum()) + carry, 10)
    total[0] = carry
    tokens = np.concatenate([digits.ravel(), total])
    return row(tokens[:-1], total, 2 * n - 1 + np.arange(n + 1))


def _majority_chance(config: MajorityConfig) -> float:
    """Answering 0, which ties make likelier."""
    n = config.seq_len - 1
    return 0.5 if n % 2 else 0.5 + comb(n, n // 2) / 2 ** (n + 1)


def _counting_chance(config: CountingConfig) -> float:
    """At each position the likeliest count: one more than a binomial number of earlier occurrences."""
    p, cap = 1 / config.n_ids, config.cap
    counts = np.zeros(cap)  # probabilities of the counts 1..C
    counts[0] = 1.0
    best = []
    for _ in range(config.seq_len):
        best.append(counts.max())
        moved = counts * p
        counts = counts - moved
        counts[1:] += moved[:-1]
        counts[-1] += moved[-1]
    return float(np.mean(best))


register_task(
    "majority",
    MajorityConfig,
    draw=majority,
    chance=_majority_chance,
    symbol=lambda config, i: "01?"[i],
    shows_positions=False,
    presets={"small": Preset(MajorityConfig(), "HazyResearch/zoology, at a size for two CPU cores")},
)
register_task(
    "counting",
    CountingConfig,
    draw=counting,
    chance=_counting_chance,
    symbol=lambda config, i: letter(i),
    answer=lambda config, i: str(i),
    presets={"small": Preset(CountingConfig(), "ours; a smoke test without published numbers")},
)
register_task(
    "addition",
    AdditionConfig,
    draw=addition,
    # A tenth for every digit of the sum but the first, which is 0 a little more often than 1.
    chance=lambda config: (0.5 + 0.5 * 0.1**config.n_digits + 0.1 * config.n_digits) / (config.n_digits + 1),
    presets={
        "small": Preset(AdditionConfig(), "Poli et al. 2023, 2302.10866, appendix C.1"),
        **{
            f"d{n}": Preset(
                AdditionConfig(n_digits=n),
                "Poli et al. 2023, 2302.10866, appendix C.1",
                "one layer learns up to 4 digits; longer numbers need two or three",
            )
            for n in (2, 4, 8)
        },
    },
)
