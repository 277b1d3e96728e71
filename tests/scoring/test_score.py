"""Scores are sums of the plain forward pass's log-softmax; a file of scores is continued bit by bit."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scoring.saved import saved_run

import hyena_jax
from hyena_jax import cli, models
from hyena_jax.config import AttentionConfig, HyenaConfig, LanguageModelConfig
from hyena_jax.data.tokenizers import BytesTokenizer, IdsTokenizer
from hyena_jax.scoring import score_file, windows
from hyena_jax.scoring.score import plan_scoring
from hyena_jax.system.errors import UserError
from hyena_jax.training.step import init_params

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("score")]

MAX_LEN, N_SYMBOLS = 67, 13
SIZES = {"n_layers": 1, "d_model": 8, "d_ff": 8, "max_len": MAX_LEN, "vocab_size": N_SYMBOLS + 3}
MODEL = models.build(LanguageModelConfig(pattern=(HyenaConfig(),), **SIZES))
DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(0, N_SYMBOLS, n) for n in (1, 0, 2, 67, 68, 86)]
NAMES = [*"abcdef"]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, init_params(MODEL, 1))


FORWARD = jax.jit(lambda params, tokens: MODEL.apply({"params": params}, tokens))


def plain(params, sequence, first, stride):
    """ln p of the tokens from `first` on: log-softmax of plain forward passes, in float64 NumPy."""
    found = np.zeros(len(sequence))
    for start in range(0, len(sequence), stride):
        end = min(start + MAX_LEN, len(sequence) - 1)
        logits = np.asarray(FORWARD(params, sequence[None, start:end])[0, :, :N_SYMBOLS], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        of_targets = np.take_along_axis(log_probs, sequence[start + 1 : end + 1, None], -1)[:, 0]
        is_new = np.arange(start + 1, end + 1) >= first
        found[start + 1 : end + 1] = np.where(is_new, of_targets, found[start + 1 : end + 1])
        first = max(first, end + 1)
        if end == len(sequence) - 1:
            break
    return found


def test_scores_are_the_forward_passes_in_float64(params):
    context, stride, n_unscored = np.array([3, 1], np.int32), 20, 2
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        tokenizer = IdsTokenizer(N_SYMBOLS)
        scoring = plan_scoring(MODEL, params, tokenizer, TEXTS, NAMES, context, stride, batch_size=2)
        for likelihood in (likelihood for block in scoring.likelihoods() for likelihood in block):
            assert len(likelihood.log_probs) == len(likelihood.tokens)
            if len(likelihood.tokens) in (2, 86):
                sequence = np.concatenate([context, likelihood.tokens])
                wanted = plain(params, sequence, n_unscored, stride)[n_unscored:]
                np.testing.assert_allclose(likelihood.log_probs, wanted, rtol=0, atol=1e-11)


def test_a_start_token_comes_before_the_prefix(params):
    class WithStart(IdsTokenizer):
        bos = 5

    scoring = plan_scoring(MODEL, params, WithStart(N_SYMBOLS), ["1 2"], ["x"], prefix="7")
    assert scoring.context.tolist() == [5, 7]
    assert scoring.plan.n_context == 2
    assert plan_scoring(MODEL, params, WithStart(N_SYMBOLS), [], []).context.tolist() == [5]


def test_what_is_derived_from_the_log_probabilities():
    found = hyena_jax.Likelihood(np.arange(5), np.log([0.5, 0.25, 0.5, 0.25]), n_bytes=10)
    assert found.log_likelihood == pytest.approx(-6 * math.log(2))
    assert found.perplexity == pytest.approx(2**1.5)
    assert found.bits_per_byte == pytest.approx(1.5 * 5 / 10)
    empty = hyena_jax.Likelihood(np.arange(1), np.zeros(0), n_bytes=1)
    assert (empty.log_likelihood, empty.perplexity, empty.bits_per_byte) == (0, None, None)


def test_bits_a_byte_of_a_file_count_first_tokens_as_any_other():
    """6 bits for 4 of 5 tokens: 1.5 bits a token, of 10 bytes; the second text is a first token alone."""
    rows = [{"tokens": 5, "scored": 4, "log_likelihood": -6 * math.log(2), "bytes": 9}]
    rows += [{"tokens": 1, "scored": 0, "log_likelihood": 0.0, "bytes": 1}]
    assert score_file.total(rows).endswith(f", {1.5 * 6 / 10:.6g} bits a byte")


LINES = "ACGTNacgtn\n" * 30 + "A\n\n" + "ACCA" * 40 + "\n" + "GATTACA\n" * 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = LanguageModelConfig(pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=32)
    folder = tmp_path_factory.mktemp("score")
    return saved_run(folder, model, LINES * 3, tokenizer="characters", seq_len=32)


def command(run, *arguments):
    return cli.main(["score", str(run.workdir), *map(str, arguments)])


def test_the_held_out_text_scores_as_eval_says(run):
    """With windows that do not overlap, as `eval` cuts the text."""
    text = run.tokenizer.decode(run.data.held_out)
    (found,) = run.score(text, stride=32)
    values = run.evaluate()
    assert -found.log_likelihood / len(found.log_probs) == pytest.approx(values["loss"], abs=1e-6)
    assert found.bits_per_byte == pytest.approx(values["bits_per_byte"], abs=1e-6)
    assert found.perplexity == pytest.approx(values["perplexity"], rel=1e-6)


def test_a_file_is_what_the_function_returns(run, tmp_path, capsys):
    path, out = tmp_path / "genome.fa", tmp_path / "out.jsonl"
    path.write_text(">a x\nACGT\nacgtn\n>b\nG\n>a\n")
    assert command(run, "--path", path, "--output", out, "--per-token", "--prefix", "N") == 0
    assert "3 texts, 10 of 10 tokens scored: " in capsys.readouterr().out
    about, *rows = map(json.loads, out.read_text().splitlines())
    assert about["scores"]["first_token"] == "scored"
    found = run.score(["ACGTacgtn", "G", ""], prefix="N")
    assert [row["name"] for row in rows] == ["a", "b", "a"]
    for row, likelihood in zip(rows, found, strict=True):
        assert row["ids"] == likelihood.tokens.tolist()
        assert np.float32(row["log_probs"]).tolist() == likelihood.log_probs.tolist()
        assert row["log_likelihood"] == likelihood.log_likelihood
        assert row["perplexity"] == likelihood.perplexity
        assert row["tokens"] == row["scored"] == row["bytes"] == len(likelihood.tokens)
    assert command(run, "--path", path) == 0
    printed, errors = capsys.readouterr()
    about, first, single, empty = map(json.loads, printed.splitlines())
    assert about["scores"]["first_token"] == "not scored"
    assert (first["scored"], single["scored"], empty["scored"]) == (8, 0, 0)
    assert (single["log_likelihood"], single["perplexity"]) == (0, None)
    assert "8 of 10 tokens scored" in errors
    assert "the first token of a record, which nothing precedes, is not scored" in errors


def test_a_scoring_that_was_killed_gives_the_same_file(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(windows, "BATCHES_AT_ONCE", 1)
    path, out, again = tmp_path / "lines.txt", tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    path.write_text(LINES)
    options = ["--path", path, "--batch-size", 4, "--output"]
    assert command(run, *options, out) == 0
    total = capsys.readouterr().out
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in (9, ends[len(ends) // 2] + 5, len(whole)):
        again.write_bytes(whole[:size])
        assert command(run, *options, again) == 0
        assert again.read_bytes() == whole
        assert capsys.readouterr().out == total


def test_wrong_input_is_refused_in_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("ACGT\n")
    (tmp_path / "foreign.txt").write_text("ACGT\nAXGT\n")
    assert command(run, "--path", "lines.txt", "--output", "out.jsonl") == 0
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    capsys.readouterr()
    for options, message in (
        (["--per-token"], "holds other scores (per_token False -> True); give a new file"),
        (["--stride", 33], "stride must be in 1..32, the model's max_len, got 33"),
        (["--batch-size", 0], "--batch-size must be in 1.."),
        (["--prefix", "x"], "prefix: text must hold only symbols of the characters vocabulary, got 'x'"),
        (["--path", "foreign.txt"], "record 2 of foreign.txt: text must hold only symbols of the characters"),
        (["--path", "none.txt"], "path 'none.txt' cannot be read"),
        (["--output", "lines.txt"], "--output must be a new file, or one with scores, which begins with"),
    ):
        files = {"--path": "lines.txt", "--output": "out.jsonl"}
        usual = [word for flag, file in files.items() if flag not in options for word in (flag, file)]
        assert command(run, *usual, *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


ROW = {"tokens": 3, "scored": 2, "bytes": 3, "log_likelihood": -1.5}
CHECKED, SECOND = (score_file.with_checksum({"name": name, **ROW}) for name in "ab")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"scores": {"stride": 4}}, r"holds other scores \(stride 4 -> 8\); give a new file"),
        ({"stride": 8}, "output must be a new file, or one with scores, which begins with"),
        ([], "output must be a new file"),
        ({"scores": {"stride": 8}, "name": 3}, "output .* holds other scores"),
    ],
)
def test_other_files_are_refused_and_stay(tmp_path, content, message):
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(content) + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError, match=message), score_file.continued(path, {"stride": 8}, "a"):
        pass
    assert path.read_bytes() == before


def test_damaged_rows_are_refused_and_torn_ones_are_written_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with score_file.continued(path, {}, "ab") as (rows, append):
        assert rows == []
        append([CHECKED])
    whole = path.read_text()
    path.write_text(whole + '{"tokens": 3, "sco')
    with score_file.continued(path, {}, "ab") as (rows, append):
        assert rows == [ROW]
        append([SECOND])
    assert path.read_text() == whole + score_file.text_of(SECOND)
    removed, swapped = ([SECOND], [SECOND, CHECKED])
    for rows in (removed, swapped):
        other = tmp_path / "other.jsonl"
        other.write_text("".join(map(score_file.text_of, [{"scores": {}}, *rows])))
        before = other.read_bytes()
        message = "line 2 of output .* is damaged: .*it is of the text 'b', not 'a'"
        with pytest.raises(UserError, match=message), score_file.continued(other, {}, "ab"):
            pass
        assert other.read_bytes() == before
    message = "must be at most 1 rows, got '2 rows or more'"
    with pytest.raises(UserError, match=message), score_file.continued(path, {}, "a"):
        pass
    wrong = ({"tokens": "x"}, {"log_likelihood": "a"}, {"bytes": 0}, {"tokens": 1e400}, {"scored": 4})
    rows = (score_file.with_checksum({"name": "a", **ROW, **values}) for values in wrong)
    flipped = score_file.text_of(CHECKED).replace("-1.5", "-1.4")
    small = score_file.text_of(score_file.with_checksum({**ROW, "log_likelihood": -1e-5}))
    damaged = ['{"tokens": 3}\n', flipped, small.replace("e-05", "E-05"), score_file.text_of(ROW)]
    for line in (*damaged, *map(score_file.text_of, rows)):
        path.write_text(whole + line)
        message = "line 3 of output .* is damaged"
        with pytest.raises(UserError, match=message), score_file.continued(path, {}, "ab"):
            pass


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        score_file.continued(path, {}, "a"),
        pytest.raises(UserError, match="is in use"),
        score_file.continued(path, {}, "a"),
    ):
        pass


def test_ids_are_checked(params):
    for text, message in (([13], r"x: token ids must be in 0..12, got \[13\]"), ([0.5], "x must be a")):
        with pytest.raises(UserError, match=message):
            plan_scoring(MODEL, params, IdsTokenizer(N_SYMBOLS), [text], ["x"])
    with pytest.raises(UserError, match="x: "):
        plan_scoring(MODEL, params, BytesTokenizer(), ["\ud800"], ["x"])
    with pytest.raises(UserError, match=r"prefix must be at most the model's max_len=67, got '68 tokens'"):
        plan_scoring(MODEL, params, BytesTokenizer(), [], [], prefix=[0] * 68)
