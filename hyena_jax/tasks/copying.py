"""Copying from the context: selective copying, and copying all of it (memorisation)."""

from dataclasses import dataclass
from typing import Annotated

from hyena_jax.config.checks import AtLeast
from hyena_jax.config.models import MAX_POSITIONS
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import require
from hyena_jax.tasks.task import SMALL, Preset, Row, np, register_task, row


@dataclass(frozen=True)
class SelectiveCopyingConfig(TaskConfig):
    """Selective copying: name the data that stand at random places among noise."""

    vocab_size: Annotated[int, AtLeast(4)] = 16
    """Ids V: 0 noise, 1 marker, data 2..V-1."""
    seq_len: int = 32
    """Tokens L before the markers; a row has L + n_data inputs."""
    n_data: Annotated[int, AtLeast(1)] = 4
    """Data ids in a row, and markers behind them."""
    test_seq_len: int | None = None
    """L of the rows to evaluate on; None takes seq_len."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seq_len", "test_seq_len"):
            length = getattr(self, name)
            fits = length is None or length >= self.n_data
            require(fits, name, length, f"at least n_data={self.n_data}")


def selective_copying(rng: "np.random.Generator", config: SelectiveCopyingConfig) -> Row:
    """Selective copying (Gu & Dao 2023, 2312.00752, section 4.1.1).

    n data at random places in L ids, the rest noise; then n markers `?`, at which the data are to be named
    in order:

        inputs   _ _ 3 _ _ _ _ 6 _ 6 _ _ ? ? ?
        target   · · · · · · · · · · · · 3 6 6

    Ids: noise 0, marker 1, data 2..V-1. The places do not repeat.
    """
    length, n = config.seq_len, config.n_data
    data = rng.integers(2, config.vocab_size, n)
    inputs = np.concatenate([np.zeros(length, np.int64), np.ones(n, np.int64)])
    inputs[np.sort(rng.permutation(length)[:n])] = data
    return row(inputs, data, length + np.arange(n))


@dataclass(frozen=True)
class MemorisationConfig(TaskConfig):
    """Memorisation, also called the copying task: name all data once the markers come."""

    vocab_size: Annotated[int, AtLeast(4)] = 18
    """Ids A: 0 noise, data 1..A-2, marker A - 1."""
    n_data: Annotated[int, AtLeast(1)] = 16
    """Data ids M, and markers behind them."""
    n_noise: Annotated[int, AtLeast(0)] = 0
    """Noise ids between the data and the markers."""
    variable: bool = False
    """The data stand at random places among the noise instead of before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs, allowed = 2 * self.n_data + self.n_noise, f"at most {MAX_POSITIONS}"
        require(inputs <= MAX_POSITIONS, "2 n_data + n_noise", inputs, allowed)


def memorisation(rng: "np.random.Generator", config: MemorisationConfig) -> Row:
    """Memorisation, also called copying (Parnichkun et al. 2024, 2405.06147; ruke1ire/RTF, copying.py).

    M data, noise, then M markers `?`, at which the data are to be named in order:

        inputs   7 6 5 3 _ _ ? ? ? ?
        target   · · · · · · 7 6 5 3

    Ids: noise 0, data 1..A-2, marker A - 1. With `variable` the data stand at random places, in order,
    among the noise.
    """
    n, noise = config.n_data, config.n_noise
    data = rng.integers(1, config.vocab_size - 1, n)
    places = np.sort(rng.permutation(n + noise)[:n]) if config.variable else np.arange(n)
    inputs = np.concatenate([np.zeros(n + noise, np.int64), np.full(n, config.vocab_size - 1)])
    inputs[places] = data
    return row(inputs, data, n + noise + np.arange(n))


register_task(
    "selective_copying",
    SelectiveCopyingConfig,
    draw=selective_copying,
    chance=lambda config: 1 / (config.vocab_size - 2),
    symbol=lambda config, i: {0: "_", 1: "?"}.get(i, str(i)),
    presets={
        "small": Preset(SelectiveCopyingConfig(), SMALL),
        "mamba": Preset(
            SelectiveCopyingConfig(vocab_size=16, seq_len=4096, n_data=16),
            "Gu & Dao 2023, 2312.00752, table 1; 400,000 steps of 64 rows",
            "S4 without gate 18.3, in H3 57.0, in Mamba's block 56.4; Hyena in H3 30.1, in Mamba's block"
            " 28.4; S6 97.0, 99.7, 99.8",
        ),
        "griffin": Preset(
            SelectiveCopyingConfig(vocab_size=16, seq_len=1024, n_data=16),
            "De et al. 2024, 2402.19427; 5 blocks, width 64, window 512",
            "all mixers solve it at the training length; Hawk learns it more slowly than attention",
        ),
    },
)
register_task(
    "memorisation",
    MemorisationConfig,
    draw=memorisation,
    chance=lambda config: 1 / (config.vocab_size - 2),
    symbol=lambda config, i: {0: "_", config.vocab_size - 1: "?"}.get(i, str(i)),
    presets={
        "small": Preset(MemorisationConfig(), SMALL),
        "rtf": Preset(
            MemorisationConfig(vocab_size=64, n_data=1024, batch_size=8),
            "Parnichkun et al. 2024, 2405.06147; 4 layers, width 64, state 64 (RTF) or 128 (S4), learning"
            " rate 1e-3, no decay, 10,000 new rows an epoch, 50 epochs",
        ),
    },
)
