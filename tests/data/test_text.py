import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from hyena_jax.config import TextConfig, UserError
from hyena_jax.data.dataset import perplexity
from hyena_jax.data.text import load_corpus
from hyena_jax.data.tokenizers import CharactersTokenizer


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("caf\u00e9 noir " * 10, encoding="utf-8")
    return TextConfig(path=str(path), tokenizer="characters", seq_len=4)


def write(config, content):
    with open(config.path, "w", encoding="utf-8") as file:
        file.write(content)


def test_tokens_are_the_text(config):
    corpus = load_corpus(config)
    assert corpus.tokenizer == CharactersTokenizer(" acfinor\u00e9")
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    assert corpus.tokenizer.decode(corpus.train) == "caf\u00e9 noir " * 9
    assert corpus.tokenizer.decode(corpus.held_out) == "caf\u00e9 noir "
    assert corpus.held_out_bytes == 11
    assert config.path in corpus.source


@pytest.mark.parametrize(("n_symbols", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_tokens_have_the_smallest_dtype(config, n_symbols, dtype):
    write(config, "".join(map(chr, range(1000, 1000 + n_symbols))))
    corpus = load_corpus(config)
    assert corpus.train.dtype == corpus.held_out.dtype == dtype
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), np.arange(n_symbols))


def test_the_vocabulary_covers_a_cluster_that_the_cut_divides(config):
    write(config, "x" * 9 + "e\u0301" * 6)
    corpus = load_corpus(dataclasses.replace(config, tokenizer="graphemes", seq_len=1))
    assert corpus.tokenizer.symbols == ("e", "e\u0301", "x", "\u0301")
    assert corpus.tokenizer.decode(corpus.train).endswith("e")
    assert corpus.tokenizer.decode(corpus.held_out) == "\u0301e\u0301"


def test_a_given_tokenizer_is_used(config):
    tokenizer = CharactersTokenizer(" acfinorz\u00e9")
    corpus = load_corpus(config, tokenizer)
    assert corpus.tokenizer is tokenizer
    assert corpus.tokenizer.decode(corpus.held_out) == "caf\u00e9 noir "
    with pytest.raises(UserError, match="characters vocabulary, got 'n', 'o', 'i', 'r'"):
        load_corpus(config, CharactersTokenizer(" acf\u00e9"))


def test_fingerprint(config):
    same, other = load_corpus(config), load_corpus(config, CharactersTokenizer(" acfinorz\u00e9"))
    assert load_corpus(config).fingerprint == same.fingerprint
    assert len(same.fingerprint) == 64
    assert other.fingerprint != same.fingerprint
    assert (
        load_corpus(dataclasses.replace(config, validation_path=config.path)).fingerprint != same.fingerprint
    )
    write(config, "caf\u00e9 noir " * 9 + "caf\u00e9 noor ")
    assert load_corpus(config).fingerprint != same.fingerprint


def test_fingerprint_knows_where_the_held_out_text_begins(tmp_path):
    def fingerprint(train, held_out):
        (tmp_path / "train").write_text(train)
        (tmp_path / "held_out").write_text(held_out)
        paths = {"path": str(tmp_path / "train"), "validation_path": str(tmp_path / "held_out")}
        return load_corpus(TextConfig(**paths, seq_len=1)).fingerprint

    assert fingerprint("abc", "de") != fingerprint("ab", "cde")


@pytest.mark.parametrize(
    ("seq_len", "message"),
    [
        (100, "the training text is too short: 90 tokens, and seq_len=100 needs at least 101"),
        (10, "the held-out text is too short: 10 tokens, and seq_len=10 needs at least 11"),
    ],
)
def test_too_short(config, seq_len, message):
    with pytest.raises(UserError, match=message):
        load_corpus(dataclasses.replace(config, seq_len=seq_len))


def test_the_shortest_text_that_fits(config):
    assert len(load_corpus(dataclasses.replace(config, seq_len=9)).held_out) == 10


def test_perplexity_overflows_to_a_number():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == pytest.approx(1.0142320547350045e304)


def test_importing_is_quick():
    slow = "{'jax', 'grain', 'tensorflow', 'tensorflow_datasets', 'tokenizers', 'regex', 'sklearn'}"
    code = f"import sys, hyena_jax.data.dataset;print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
