"""Every token is scored once, from the tokens that the docstring says."""

import itertools

import pytest

from hyena_jax.scoring.windows import LEAST_LENGTH, WindowPlan, padded, windows


@pytest.mark.parametrize(("max_len", "stride"), [(1, 1), (7, 1), (7, 3), (7, 4), (7, 7), (8, 5)])
def test_every_token_is_scored_once_from_the_tokens_that_are_named(max_len, stride):
    for n_context, n_tokens in itertools.product((0, 1, min(3, max_len)), range(31)):
        first, end = max(n_context, 1), n_context + n_tokens
        found = list(windows(5, n_context, n_tokens, max_len, stride))
        read = {t: window.start for window in found for t in window.targets}
        assert sum(window.scored for window in found) == len(read)
        for window in found:
            assert 1 <= window.scored <= window.length <= max_len
            assert window.text == 5
        starts = {t: max(0, -(-(t - max_len) // stride)) * stride for t in range(first, end)}
        assert read == starts
        assert all(max_len - stride < t - start <= max_len for t, start in starts.items() if t > max_len)


def test_shapes_are_few_and_no_window_is_lost():
    sizes = tuple(range(1, 700, 7))
    plan = WindowPlan(sizes, n_context=0, max_len=200, stride=50, batch_size=2, row_shards=4)
    blocks = list(plan.blocks())
    assert len(blocks) > 3
    assert [i for block in blocks for i in block] == [*range(len(sizes))]
    batches = [batch for block in blocks for batch in plan.batches(block)]
    assert len({(batch.n_rows, batch.length) for batch in batches}) <= 4
    assert all(batch.n_rows % 4 == 0 and len(batch.windows) <= batch.n_rows for batch in batches)
    assert all(window.length <= batch.length for batch in batches for window in batch.windows)
    found = sorted(window for batch in batches for window in batch.windows)
    assert found == [w for i, n in enumerate(sizes) for w in windows(i, 0, n, 200, 50)]
    assert len(found) == plan.n_windows(range(len(sizes)))


def test_a_few_short_texts_are_not_padded_to_a_whole_batch():
    plan = WindowPlan((9, 0, 1, 12, 5), n_context=0, max_len=1024, stride=512, batch_size=16, row_shards=1)
    (block,) = plan.blocks()
    (batch,) = plan.batches(block)
    assert (len(batch.windows), batch.n_rows, batch.length) == (3, 4, LEAST_LENGTH)


def test_padded_lengths_are_halves_of_the_longest():
    lengths = {padded(length, 1000) for length in range(1, 1001)}
    assert lengths == {32, 63, 125, 250, 500, 1000}
    assert all(length <= padded(length, 1000) < max(2 * length + 1, 33) for length in range(1, 1001))
    assert {padded(length, 7) for length in range(1, 8)} == {7}
