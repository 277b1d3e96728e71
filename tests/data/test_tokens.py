"""Token files are memory-mapped, never read as a whole, and wrong files are refused by name."""

import numpy as np
import pytest

from hyena_jax.config import TextConfig, TokensConfig
from hyena_jax.data import text, tokens
from hyena_jax.data.dataset import encoding_from_json, load
from hyena_jax.data.text import load_text
from hyena_jax.data.tokenizers import IdsTokenizer
from hyena_jax.system.errors import UserError

TOKENS = np.random.default_rng(0).integers(0, 700, 300)
TOKENS[17] = 699


def write(folder, name, values):
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, values, allow_pickle=True)
    else:
        path.write_bytes(values if isinstance(values, bytes) else values.tobytes())
    return str(path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("a.npy", "int64"), ("a.npy", "uint16"), ("a.npy", ">u4"), ("a.bin", "uint16"), ("a.bin", "uint32")],
)
def test_tokens_are_mapped(tmp_path, name, dtype, monkeypatch):
    path = write(tmp_path, name, TOKENS.astype(dtype))
    options = {"dtype": dtype} if name.endswith("bin") else {}
    data = load(TokensConfig(path, seq_len=8, **options))
    assert isinstance(data.train, np.memmap)
    assert data.tokenizer == IdsTokenizer(700)
    np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), TOKENS)
    assert len(data.held_out) == 30
    batch = data.train_batches(4, 0)[3]
    assert batch["inputs"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    monkeypatch.setattr(text, "HASHED_AT_ONCE", 7)
    monkeypatch.setattr(tokens, "HASHED_AT_ONCE", 7)
    again = load(TokensConfig(path, seq_len=8, **options), encoding_from_json(data.to_json()))
    assert (again.fingerprint, again.tokenizer) == (data.fingerprint, data.tokenizer)
    other = write(tmp_path, f"other{name[1:]}", TOKENS.astype(dtype)[::-1])
    assert load(TokensConfig(other, seq_len=8, **options)).fingerprint != data.fingerprint


def test_a_vocabulary_and_a_held_out_file_may_be_given(tmp_path):
    path, held_out = (write(tmp_path, f"{n}.npy", TOKENS[:n]) for n in (200, 50))
    data = load(TokensConfig(path, held_out, vocab_size=1000, seq_len=8))
    assert (data.tokenizer.vocab_size, len(data.train), len(data.held_out)) == (1000, 200, 50)


@pytest.mark.parametrize(
    ("name", "values", "options", "message"),
    [
        ("a.npy", TOKENS / 2, {}, r"path '.*a.npy' must be a one-dimensional array.* got 'float64\[300\]'"),
        ("a.npy", TOKENS.reshape(3, 100), {}, r"must be a one-dimensional array.* got 'int64\[3, 100\]'"),
        ("a.npy", TOKENS - 700, {}, "tokens to train on must be ids, at least 0, got -"),
        ("a.npy", TOKENS[:0], {}, "a.npy' .*empty"),
        ("a.npy", TOKENS.astype(object), {}, "a.npy' must be a .npy file of numbers: .*Python objects"),
        ("a.npy", TOKENS + 2**24, {}, "tokens must be ids below 16777216"),
        ("a.npy", TOKENS, {"vocab_size": 699}, "tokens must be ids below the vocabulary's size 699, got 699"),
        ("a.npy", TOKENS[:50], {}, "the held-out stream of tokens is too short: 5 tokens, and seq_len=8"),
        ("a.bin", b"abc", {}, "must be uint16 numbers, a multiple of 2 bytes, got '3 bytes'"),
        ("a.bin", b"", {}, "got '0 bytes'"),
        ("a.txt", b"ab", {}, "path must be a .npy or .bin file of tokens, got"),
    ],
)
def test_what_is_not_tokens_is_refused(tmp_path, name, values, options, message):
    path = write(tmp_path, name, values)
    with pytest.raises(UserError, match=message):
        load(TokensConfig(path, seq_len=8, **options))


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="data.path must be a .npy or .bin file of tokens, got None"):
        load(TokensConfig())
    with pytest.raises(UserError, match="path '.*no.npy' cannot be read: .*No such file"):
        load(TokensConfig(str(tmp_path / "no.npy")))
    for shape in (f"({2**62}, 4)", f"({10**30},)", "(-30,)", "(29,)", "(31,)"):
        header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
        (tmp_path / "lie.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.encode() + bytes(60))
        with pytest.raises(UserError, match=r"lie.npy' must be (a .npy file of numbers|18\d bytes long)"):
            load(TokensConfig(str(tmp_path / "lie.npy"), seq_len=2))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(UserError, match="broken.npy' must be a .npy file of numbers"):
        load(TokensConfig(str(tmp_path / "broken.npy")))
    path = write(tmp_path, "a.npy", TOKENS)
    with pytest.raises(UserError, match="ids below the vocabulary's size 5"):
        load(TokensConfig(path, seq_len=8), IdsTokenizer(5))
    with pytest.raises(UserError, match="a.npy' is a file of tokens, not of text; add --data tokens"):
        load_text(TextConfig(path=path))


def test_ids_as_text():
    tokenizer = IdsTokenizer(12)
    assert tokenizer.encode(" 1 2\n11 ").tolist() == [1, 2, 11]
    assert tokenizer.decode([1, 2, 11]) == "1 2 11"
    assert encoding_from_json({"tokenizer": tokenizer.to_json()}) == tokenizer
    stream = tokenizer.stream()
    assert "".join([stream([1, 2]), stream([]), stream([3]), stream([], final=True)]) == "1 2 3"
    for wrong in ("1 x", "-1", "1.5", "\u0663"):
        with pytest.raises(UserError, match="text must be token ids such as '1 2 3', got"):
            tokenizer.encode(wrong)
    with pytest.raises(UserError, match=r"ids must be in \[0, 12\), got 12"):
        tokenizer.encode("12")
