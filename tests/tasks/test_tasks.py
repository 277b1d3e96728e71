"""Rows of every task: solved by its definition, reproducible, disjoint, and at chance for a blind guess."""

import dataclasses
import itertools

import numpy as np
import pytest
from grid import in_grid
from solutions import SOLUTIONS

from hyena_jax.config import TASK_CONFIGS
from hyena_jax.data.tasks import draw_row, load_task
from hyena_jax.system.errors import UserError
from hyena_jax.tasks import mad, states
from hyena_jax.tasks.arithmetic import AdditionConfig, CountingConfig, MajorityConfig
from hyena_jax.tasks.copying import MemorisationConfig, SelectiveCopyingConfig
from hyena_jax.tasks.mad import (
    MadFuzzyRecallConfig,
    MadMemorisationConfig,
    MadNoisyRecallConfig,
    MadRecallConfig,
    MadSelectiveCopyingConfig,
)
from hyena_jax.tasks.recall import InductionConfig, MQARConfig, RecallConfig
from hyena_jax.tasks.states import (
    ModularAdditionConfig,
    ModularArithmeticConfig,
    ParityConfig,
    PermutationWordsConfig,
)
from hyena_jax.tasks.strings import CopyingConfig, PrefixNgramConfig
from hyena_jax.tasks.task import TASKS

DEFAULTS = [(name, config_class()) for name, config_class in TASK_CONFIGS.items()]
ODD = [
    ("recall", RecallConfig(vocab_size=8, seq_len=2)),
    ("recall", RecallConfig(vocab_size=60, seq_len=14, disjoint=True)),
    ("mqar", MQARConfig(vocab_size=10, seq_len=18, n_pairs=4)),
    ("mqar", MQARConfig(vocab_size=4, seq_len=4, n_pairs=1, disjoint=False)),
    ("mqar", MQARConfig(vocab_size=8192, seq_len=64, n_pairs=16, gap_power=2.0)),
    ("induction", InductionConfig(vocab_size=5, seq_len=3, test_seq_len=11)),
    ("selective_copying", SelectiveCopyingConfig(vocab_size=4, seq_len=5, n_data=5)),
    ("memorisation", MemorisationConfig(vocab_size=10, n_data=4, n_noise=7)),
    ("memorisation", MemorisationConfig(vocab_size=10, n_data=4, n_noise=7, variable=True)),
    ("copying", CopyingConfig(n_letters=26, min_len=1, max_len=5, test_min_len=6, test_max_len=13)),
    ("prefix_ngram", PrefixNgramConfig(n_letters=3, n_gram=1, min_len=7, max_len=9, answer_len=2)),
    ("mad_recall", MadRecallConfig(vocab_size=7, seq_len=4)),
    ("mad_noisy_recall", MadNoisyRecallConfig(vocab_size=11, n_noise=5, noise_fraction=0.9, seq_len=10)),
    ("mad_fuzzy_recall", MadFuzzyRecallConfig(vocab_size=16, seq_len=16)),
    ("mad_fuzzy_recall", MadFuzzyRecallConfig(vocab_size=9, seq_len=31, motif=2)),
    ("mad_selective_copying", MadSelectiveCopyingConfig(vocab_size=5, seq_len=7, n_data=3)),
    ("parity", ParityConfig(min_len=2, max_len=9, test_min_len=None, test_max_len=None, disjoint=False)),
    ("parity", ParityConfig(every_position=False)),
    ("modular_arithmetic", ModularArithmeticConfig(modulus=7, min_len=4, test_min_len=3)),
    ("modular_addition", ModularAdditionConfig(modulus=2)),
    ("permutation_words", PermutationWordsConfig(group="s5", seq_len=7)),
    ("permutation_words", PermutationWordsConfig(group="a5", seq_len=7)),
    ("majority", MajorityConfig(seq_len=9)),
    ("counting", CountingConfig(n_ids=2, seq_len=31, cap=4)),
    ("addition", AdditionConfig(n_digits=1)),
    ("addition", AdditionConfig(n_digits=23)),
]
PUBLISHED = [
    (f"{name}/{preset}", preset_.config)
    for name, config_class in TASK_CONFIGS.items()
    for preset, preset_ in TASKS[config_class].presets.items()
]


def weights_of(row):
    return np.ones(len(row.targets)) if row.weights is None else row.weights


def scored(row):
    """{position: answer} of a row."""
    positions = range(len(row.inputs)) if row.positions is None else row.positions.tolist()
    triples = zip(positions, row.targets.tolist(), weights_of(row), strict=True)
    return {position: answer for position, answer, weight in triples if weight > 0}


def rows_of(config, n=40, part="test", seed=0):
    return [draw_row(TASKS[type(config)], config, part, seed, i) for i in range(n)]


@pytest.mark.parametrize(
    ("name", "config"),
    [case for case in DEFAULTS + ODD if case[0] in SOLUTIONS],
    ids=lambda value: str(value)[:60],
)
def test_the_answers_solve_the_task_by_its_definition(name, config):
    for row in rows_of(config):
        assert scored(row) == SOLUTIONS[name](row.inputs.tolist(), config.for_evaluation())
        largest = max(row.inputs.max(), row.targets.max())
        assert min(row.inputs.min(), row.targets.min()) >= 0
        assert largest < config.n_symbols


@pytest.mark.parametrize(("name", "config"), DEFAULTS + ODD, ids=lambda value: str(value)[:60])
def test_rows_depend_on_seed_and_index_alone_and_have_one_shape(name, config):
    task = TASKS[type(config)]
    for part in ("train", "test"):
        rows = rows_of(config, 6, part, seed=3)
        for array, same in zip(rows[5], draw_row(task, config, part, 3, 5), strict=True):
            np.testing.assert_array_equal(array, same)
        forms = {tuple(None if x is None else (x.shape, x.dtype.str) for x in row) for row in rows}
        assert len(forms) == 1
        if config.n_symbols > 5 and rows[0].inputs.size > 10:
            other = draw_row(task, config, part, 4, 5)
            assert len({row.inputs.tobytes() for row in [*rows, other]}) == 7


def test_training_rows_of_strings_hold_whole_examples_and_leave_the_cut_one_unscored():
    for config in (CopyingConfig(), PrefixNgramConfig()):
        signs = "abcdefgh$|.*"
        for row in rows_of(config, 20, "train"):
            shown = "".join(signs[k] for k in [*row.inputs, row.targets[-1]])
            assert len(shown) == config.row_len
            whole = shown[: shown.rindex(".") + 1] if "." in shown else ""
            place, expected = 0, []
            for example in whole.split("$")[1:]:
                answer = example[example.rindex("|") + 1 :]
                place += 1 + len(example)
                expected += [(place - len(answer) - 1 + k, signs.index(c)) for k, c in enumerate(answer)]
            assert sorted(scored(row).items()) == expected


def test_training_on_all_tokens_predicts_the_next_and_holds_the_answer():
    for name in ("recall", "induction", "mad_recall", "mad_noisy_recall"):
        config = dataclasses.replace(TASK_CONFIGS[name](), predict_all=True, disjoint=False)
        task = TASKS[type(config)]
        every = draw_row(task, config, "train", 1, 2)
        np.testing.assert_array_equal(every.inputs[1:], every.targets[:-1])
        only = draw_row(task, dataclasses.replace(config, predict_all=False), "train", 1, 2)
        np.testing.assert_array_equal(only.inputs, every.inputs)
        assert scored(only).items() <= scored(every).items()
        assert scored(only) == SOLUTIONS[name](only.inputs.tolist(), config)


# Rows that the published code drew: they fix conventions that the solutions share with the package.
DRAWN = [
    ("mad_recall", MadRecallConfig(16, 16), "5 12 2 10 0 8 0 8 1 14 5 12 7 12 1", {6: 8, 10: 12, 14: 14}),
    ("modular_arithmetic", ModularArithmeticConfig(), "5 3 8 2 7 2 5 3 6 4", {9: 8}),
    ("permutation_words", PermutationWordsConfig("s5"), "102 76 61 32", {0: 102, 1: 71, 2: 80, 3: 30}),
]


@pytest.mark.parametrize(("name", "config", "inputs", "answers"), DRAWN)
def test_the_definitions_agree_with_the_published_examples(name, config, inputs, answers):
    assert SOLUTIONS[name]([int(i) for i in inputs.split()], config) == answers


def test_the_facts_are_the_published_map():
    values = mad.value_of_key(256)
    assert (values[56], values[92]) == (197, 135)
    assert sorted(values) == sorted(set(values))
    assert (values.min(), len(values)) == (127, 127)
    row = draw_row(TASKS[MadMemorisationConfig], MadMemorisationConfig(), "test", 0, 0)
    assert set(scored(row)) == set(range(1, 32, 2))
    assert all(row.inputs[i] == 255 and values[row.inputs[i - 1]] == y for i, y in scored(row).items())


@pytest.mark.parametrize("group", ["s3", "s4", "a4", "s5", "a5"])
def test_the_groups_are_groups(group):
    table = states.table(group)
    n = len(table)
    assert n == PermutationWordsConfig(group=group).n_symbols
    np.testing.assert_array_equal(table[0], np.arange(n))
    np.testing.assert_array_equal(np.sort(table, axis=1), np.tile(np.arange(n), (n, 1)))
    a, b, c = np.random.default_rng(0).integers(n, size=(3, 200))
    np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])


def test_the_gaps_of_mqar_are_drawn_as_by_a_sequential_draw_without_repetition():
    """The probability that each gap is among the two drawn, summed over all ordered pairs."""
    config = MQARConfig(vocab_size=16, seq_len=12, n_pairs=2, gap_power=0.01, disjoint=False)
    weight = np.arange(1, 5) ** (config.gap_power - 1)
    p = weight / weight.sum()
    expected = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        expected[[first, second]] += p[first] * p[second] / (1 - p[first])
    rows = rows_of(config, 1500)
    found = np.bincount(np.concatenate([(row.positions - 4) // 2 for row in rows]), minlength=4) / len(rows)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(len(rows)))


# Few rows are different: nothing else than the rule keeps the parts apart.
@pytest.mark.parametrize(
    "config",
    [
        AdditionConfig(n_digits=1),
        *in_grid(ParityConfig(min_len=5, max_len=7, test_min_len=6, test_max_len=9)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_no_test_row_is_a_training_row_at_a_small_vocabulary(config):
    def texts(config, part, n):
        return {tuple(np.trim_zeros(row.inputs, "b")) for row in rows_of(config, n, part)}

    test = texts(config, "test", 60)
    assert test
    assert not test & texts(config, "train", 400)
    leaky = dataclasses.replace(config, disjoint=False)
    assert texts(leaky, "test", 60) & texts(leaky, "train", 400)


def test_too_few_different_rows_are_one_clear_error():
    config = CountingConfig(n_ids=1, seq_len=3)
    with pytest.raises(UserError, match="disjoint must be False with so few different rows, got True"):
        for part in ("train", "test"):
            rows_of(config, 1, part)


CHANCE = [
    *(pytest.param(*case, marks=pytest.mark.grid) for case in DEFAULTS if case[0] != "mad_fuzzy_recall"),
    ("mqar", MQARConfig(vocab_size=8, seq_len=12, n_pairs=2)),
    ("majority", MajorityConfig(seq_len=7)),
    ("counting", CountingConfig(n_ids=3, seq_len=20, cap=4)),
    ("addition", AdditionConfig(n_digits=2)),
    ("copying", CopyingConfig(n_letters=3, min_len=2, max_len=6)),
    ("prefix_ngram", PrefixNgramConfig(n_letters=26, n_gram=2, min_len=6, max_len=7)),
    ("parity", ParityConfig(every_position=False, max_len=9, test_min_len=None, test_max_len=None)),
]


@pytest.mark.parametrize(("name", "config"), CHANCE, ids=lambda value: str(value)[:60])
def test_chance_is_what_the_best_guess_by_position_scores(name, config):
    """The most frequent answer at each scored position of half of the rows, scored on the other half.

    The most frequent answer of a sample is at most as good as the best guess; where answers are alike, it is
    exactly as good in the mean.
    """
    if name == "modular_arithmetic":  # chance is the source's: a uniform guess
        answers = np.concatenate([row.targets for row in rows_of(config, 1500)])
        guesses = 5 + np.random.default_rng(0).integers(config.modulus, size=answers.size)
        right, weights = (answers == guesses)[:, None], np.ones((answers.size, 1))
    else:
        rows = rows_of(dataclasses.replace(config, disjoint=False), 1200)
        answers = np.stack([row.targets for row in rows])
        weights = np.stack([weights_of(row) for row in rows])
        counted = zip(answers[:600].T, weights[:600].T, strict=True)
        best = [np.bincount(y, weights=w).argmax() for y, w in counted]
        right, weights = answers[600:] == np.array(best), weights[600:]
    found = (right * weights).sum() / weights.sum()
    chance = TASKS[type(config)].chance(config.for_evaluation())
    # Answers of one row depend on each other: the error counts rows.
    error = np.sqrt(chance * (1 - chance) / len(right))
    assert abs(found - chance) < 4 * error


def test_chance_of_addition_of_fuzzy_recall_and_of_compression():
    """A uniform guess among the ids of values; the mean over positions where the last is known."""
    # Of all sums of two digits 55 of 100 begin with 0, and each last digit is as likely.
    assert TASKS[AdditionConfig].chance(AdditionConfig(n_digits=1)) == pytest.approx((0.55 + 0.1) / 2)
    config = MadFuzzyRecallConfig()
    rows = rows_of(config, 250)
    answers = np.concatenate([list(scored(row).values()) for row in rows])
    counts = np.bincount(answers, minlength=15)[7:] / answers.size
    assert counts.size == 8
    np.testing.assert_allclose(counts, TASKS[type(config)].chance(config), atol=0.03)
    compression = TASK_CONFIGS["mad_compression"]
    assert TASKS[compression].chance(compression(4, 5)) == (4 / 3 + 1) / 5


@pytest.mark.grid
def test_mad_scores_as_many_answers_as_the_published_code():
    """56 of 127 positions on average, 4.6 in fuzzy recall."""
    for config, mean in ((MadRecallConfig(seq_len=128), 56.0), (MadFuzzyRecallConfig(seq_len=128), 4.6)):
        counts = [len(scored(row)) for row in rows_of(config, 400)]
        assert abs(np.mean(counts) - mean) < 4 * np.std(counts) / np.sqrt(len(counts)) + 0.05


MQAR = {"vocab_size": 8192, "gap_power": 0.01, "train_rows": 100_000, "test_rows": 3_000}
MAD = {"test_rows": 1_280, "batch_size": 128, "train_rows": 12_800}
SETTINGS = {
    "mqar/l64": {"seq_len": 64, "n_pairs": 4, "batch_size": 512, **MQAR},
    "mqar/l256": {"seq_len": 256, "n_pairs": 16, "batch_size": 256, **MQAR},
    **{
        f"recall/{name}": {"vocab_size": 30, "seq_len": length, "train_rows": 2000, "batch_size": 32}
        for name, length in (("l30k", 30_000), ("l64k", 65_536), ("l131k", 131_072), ("v30_l2048", 2048))
    },
    "selective_copying/mamba": {"vocab_size": 16, "seq_len": 4096, "n_data": 16},
    "induction/mamba": {"vocab_size": 16, "seq_len": 256},
    "induction/safari": {"train_rows": 5000, "test_rows": 500},
    "parity/published": {"min_len": 3, "max_len": 40, "test_min_len": 40, "test_max_len": 256}
    | {"batch_size": 256, "test_rows": 8192, "every_position": False},
    "memorisation/rtf": {"vocab_size": 64, "n_data": 1024, "n_noise": 0, "batch_size": 8},
    "copying/published": {"n_letters": 26, "min_len": 5, "max_len": 20, "row_len": 220},
    "mad_recall/baseline": {"vocab_size": 16, "seq_len": 128, **MAD},
    "mad_noisy_recall/baseline": {"vocab_size": 32, "seq_len": 128, **MAD},
    "mad_fuzzy_recall/baseline": {"vocab_size": 16, "seq_len": 128, **MAD},
    "mad_selective_copying/baseline": {"vocab_size": 16, "seq_len": 256, **MAD},
    "mad_compression/baseline": {"vocab_size": 16, "seq_len": 32, **MAD},
    "mad_memorisation/baseline": {"vocab_size": 256, "seq_len": 32, **MAD, "train_rows": 256},
    "mad_noisy_recall/noise80": {"noise_fraction": 0.8},
    "mad_memorisation/v8192": {"vocab_size": 8192},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_presets_are_the_published_settings(name):
    """The numbers of the design notes, by hand."""
    config, expected = dict(PUBLISHED)[name], SETTINGS[name]
    assert {field: getattr(config, field) for field in expected} == expected


def test_the_chance_and_the_levels_of_noise_of_presets():
    assert TASKS[RecallConfig].chance(dict(PUBLISHED)["recall/l131k"]) == 1 / 14
    presets = TASKS[MadNoisyRecallConfig].presets
    assert {name for name in presets if "noise" in name} == {"noise40", "noise60", "noise80"}


@pytest.mark.parametrize(("name", "config"), PUBLISHED)
def test_every_preset_draws_rows(name, config):
    if getattr(config, "seq_len", 0) > 10_000:
        config = dataclasses.replace(config, seq_len=config.seq_len // 64 * 2)
    data = load_task(config)
    assert data.row_shape[0] >= 2
    assert 0 < data.chance < 1


WRONG = [
    (MQARConfig, {"vocab_size": 63}, "vocab_size must be even, got 63"),
    (MQARConfig, {"gap_power": 0.0}, "gap_power must be above 0, got 0.0"),
    (RecallConfig, {"seq_len": 7}, "seq_len must be even, got 7"),
    (SelectiveCopyingConfig, {"seq_len": 3}, "seq_len must be at least n_data=4, got 3"),
    (CopyingConfig, {"row_len": 18}, r"row_len must be at least 19, the longest example \(or lower max_le"),
    (CopyingConfig, {"n_letters": 27}, "n_letters must be in 2..26, got 27"),
    (CopyingConfig, {"max_len": 2}, "max_len must be at least min_len=3, got 2"),
    (CopyingConfig, {"test_min_len": 9}, "test_max_len must be at least test_min_len=9, got 8"),
    (CopyingConfig, {"disjoint": True}, "disjoint must be False for strings"),
    (PrefixNgramConfig, {"min_len": 4}, r"min_len must be at least n_gram \+ answer_len \+ 3 = 5, got 4"),
    (PrefixNgramConfig, {"test_min_len": 4}, "test_min_len must be at least n_gram"),
    (MadNoisyRecallConfig, {"n_noise": 31}, r"n_noise must be in 1..vocab_size - 3 = 29, got 31"),
    (MadFuzzyRecallConfig, {"seq_len": 15}, r"seq_len must be at least 5 motif \+ 1 = 16, got 15"),
    (MadFuzzyRecallConfig, {"vocab_size": 6}, r"vocab_size must be at least 2 motif \+ 1 = 7, got 6"),
    (MadSelectiveCopyingConfig, {"seq_len": 16}, r"seq_len must be at least 2 n_data \+ 1 = 17, got 16"),
    (MadMemorisationConfig, {"disjoint": True}, "disjoint must be False: the evaluation asks"),
    (ParityConfig, {"test_max_len": 39}, "test_max_len must be at least test_min_len=40, got 39"),
    (PermutationWordsConfig, {"group": "s6"}, "group 's6' is unknown .did you mean"),
    (CountingConfig, {"cap": 1}, "cap must be at least 2, got 1"),
]


@pytest.mark.parametrize(("config_class", "options", "message"), WRONG)
def test_settings_that_do_not_fit_are_one_line(config_class, options, message):
    with pytest.raises(UserError, match=message) as caught:
        config_class(**options)
    assert "\n" not in str(caught.value)


def test_a_marker_of_induction_is_followed_by_a_symbol():
    config = InductionConfig(seq_len=5)
    rows = [TASKS[InductionConfig].draw(np.random.default_rng(seed), config) for seed in range(60)]
    places = [row.inputs.tolist().index(15) for row in rows]
    assert {*places} == {0, 1, 2}
    for row, place in zip(rows, places, strict=True):
        assert row.targets[0] == row.inputs[place + 1]
