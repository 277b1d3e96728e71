"""Vectors of texts are the hidden states of the plain forward pass, whatever the batches."""

import json

import jax
import numpy as np
import pytest
from grid import in_grid
from scoring.saved import saved_run
from tolerances import assert_close

from hyena_jax import cli
from hyena_jax.config import HawkConfig, LanguageModelConfig
from hyena_jax.scoring.score import POOLS
from hyena_jax.system.errors import UserError

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("embed")]
MAX_LEN = 40
MODEL = LanguageModelConfig(pattern=(HawkConfig(),), n_layers=2, d_model=8, d_ff=8, max_len=MAX_LEN)
TEXTS = ["a", "The cat sat on the mat, and then it sat there all day, too..", "b"]
"""The second is two windows of the same length."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("embed"), MODEL)


def plain(run, text, layer, stride=MAX_LEN // 2):
    """States of the text's tokens [n, D], window by window, without padding."""
    ids, variables = run.tokenizer.encode(text).astype(np.int32), {"params": run.params}
    features = jax.jit(lambda ids: run.model.apply(variables, ids, None, True, layer, method="features"))
    found, start = [], 0
    while True:
        states = features(ids[None, start : start + MAX_LEN])[0]
        found.append(np.asarray(states)[len(np.concatenate(found)) - start if found else 0 :])
        if start + MAX_LEN >= len(ids):
            return np.concatenate(found)
        start += stride


@pytest.mark.parametrize("layer", [1, *in_grid(0, None)])
def test_states_are_those_of_the_plain_forward_pass(run, layer):
    of_tokens = run.embed(TEXTS, layer=layer, pool="none", batch_size=2)
    for text, rows in zip(TEXTS, of_tokens, strict=True):
        assert rows.dtype == np.float32
        assert_close(rows, np.float64(plain(run, text, layer)))
    means = run.embed(TEXTS, layer=layer, batch_size=2)
    assert_close(means, np.stack([np.float64(rows).mean(axis=0) for rows in of_tokens]))
    assert_close(POOLS["last"](of_tokens[1]), of_tokens[1][-1:])


@pytest.mark.wide
def test_a_prefix_is_seen_and_gets_no_vector(run):
    alone, after = (run.embed(["cat"], prefix=prefix, pool="none")[0] for prefix in ("", "the "))
    assert alone.shape == after.shape == (3, 8)
    assert_close(after, np.float64(plain(run, "the cat", None)[4:]))
    assert not np.allclose(alone, after)


def test_the_command_writes_an_array_and_its_index(run, tmp_path, capsys):
    fasta, output = tmp_path / "two.fa", tmp_path / "rows.npy"
    fasta.write_text(">one\nACGT\n>two\nACG\nTT\n")
    command = ["embed", str(run.workdir), "--path", str(fasta), "--output", str(output), "--pool", "none"]
    assert cli.main(command) == 0
    rows = np.load(output)
    index = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert index == [
        {"name": "one", "tokens": 4, "row": 0, "rows": 4},
        {"name": "two", "tokens": 5, "row": 4, "rows": 5},
    ]
    np.testing.assert_array_equal(rows, np.concatenate(run.embed(["ACGT", "ACGTT"], pool="none")))
    capsys.readouterr()
    assert cli.main(command) == 2
    assert "--output must be a file that does not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer must be in 0..2, the model's blocks, got 3"),
        ({"pool": "max"}, "pool 'max' is unknown"),
        ({"texts": [""]}, r"texts\[0\] must be at least one token long, for pool 'mean'"),
        ({"stride": 0}, "stride must be in 1..40"),
    ],
)
def test_wrong_arguments(run, options, message):
    with pytest.raises(UserError, match=message):
        run.embed(**{"texts": TEXTS, **options})
