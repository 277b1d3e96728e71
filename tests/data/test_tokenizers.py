import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hyena_jax.config import TextConfig
from hyena_jax.data.text import load_corpus
from hyena_jax.data.tokenizers import (
    BpeTokenizer,
    BytesTokenizer,
    CharactersTokenizer,
    DnaTokenizer,
    GraphemesTokenizer,
    IdsTokenizer,
    build_tokenizer,
    decode_after,
    encode_start,
    tokenizer_from_json,
)
from hyena_jax.generation.prompts import StopTexts
from hyena_jax.system.errors import UserError

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
SAMPLE = f"cafe\u0301 na\u00efve\r\n{FAMILY} \U0001f1eb\U0001f1f7 \ud55c\uae00 \u1112\u1161\u11ab\n\n  end"
PIECES = st.sampled_from(
    ["a", " ", "\n", "\r\n", "e\u0301", "\u0301", FAMILY, "\U0001f1eb\U0001f1f7", "\u200d", "\u00df"]
)
# With an alphabet, Hypothesis does not tabulate all of Unicode first, which takes seconds.
LETTERS = st.text("ab\0 \t\n\r\x7f\u00e9\u0301\u1112\u1161\u4e2d\u200d\ufeff\uffff\U0001f469\U0010ffff")
TEXTS = st.one_of(LETTERS, st.lists(PIECES).map("".join))


def trained_bpe(texts, end, vocab_size):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [end], "show_progress": False, "initial_alphabet": alphabet}
    model.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return model


def of_letters(vocab, merges=(), **options):
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [*merges], **options))


MODEL = trained_bpe([SAMPLE, "the cat sat on the mat, the cat sat"] * 3, "<|end|>", vocab_size=300)
BPE = BpeTokenizer(MODEL.to_str())


def build(kind, *texts):
    return BPE if kind == "bpe" else build_tokenizer(TextConfig(tokenizer=kind), *texts)


KINDS = ("bytes", "characters", "graphemes", "bpe")


def streamed(tokenizer, parts):
    """What a stream says of these ids, and at the end."""
    stream = tokenizer.stream()
    said = "".join([stream(part) for part in parts])
    return said, said + stream([], final=True)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=5))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_round_trip_of_texts_and_of_tokenizers_at_once_and_in_parts(kind, text, cuts):
    tokenizer = build(kind, text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert np.all((ids >= 0) & (ids < tokenizer.vocab_size))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert again == tokenizer
    assert again.kind == kind
    np.testing.assert_array_equal(again.encode(text), ids)
    before, whole = streamed(tokenizer, np.split(ids, sorted(cuts)))
    assert text.startswith(before)
    assert whole == text


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE], ids=["bytes", "bpe"])
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_stream_of_arbitrary_ids_equals_decode(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    assert streamed(tokenizer, [[i] for i in ids])[1] == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE], ids=["bytes", "bpe"])
def test_stream_prints_a_character_when_it_is_whole(tokenizer):
    # Neither vocabulary has a piece for this character.
    ids = tokenizer.encode("\U0001f980")
    assert len(ids) > 2
    stream = tokenizer.stream()
    assert [stream([i]) for i in ids] == [""] * (len(ids) - 1) + ["\U0001f980"]
    assert stream(ids[:2]) == ""
    assert stream([], final=True) == "\ufffd"


def test_stream_keeps_the_space_that_a_decoder_drops_from_a_first_piece():
    model = of_letters({"\u2581a": 0, "\u2581b": 1, "c": 2})
    model.decoder = tokenizers.decoders.Metaspace()
    tokenizer = BpeTokenizer(model.to_str())
    stream = tokenizer.stream()
    assert [stream([i]) for i in (0, 2, 1, 1)] == ["a", "c", " b", " b"]
    assert tokenizer.decode([0, 2, 1, 1]) == "ac b b"
    assert decode_after(tokenizer, [0, 2], [1, 1]) == " b b"
    watch = StopTexts(tokenizer, (" b",)).watch(np.array([0, 2]))
    assert watch([1, 1]) == 1


def test_a_prompt_that_ends_within_a_character_is_no_part_of_what_follows():
    ids = BPE.encode("A line\nQ: \U0001f980 more").tolist()
    n = next(n for n in range(1, len(ids)) if BPE.decode(ids[:n]).endswith("\ufffd"))
    assert decode_after(BPE, ids[:n], ids[n:]) == "\U0001f980 more"
    assert StopTexts(BPE, ("\n",)).watch(np.array(ids[:n]))(ids[n:]) is None


def test_a_continuation_shows_a_character_that_it_does_not_finish_and_begins_without_a_space():
    assert decode_after(BytesTokenizer(), [65], [66, 0xC3]) == "B\ufffd"
    assert decode_after(IdsTokenizer(9), [1, 2], [3, 4]) == "3 4"


def test_ids_that_no_integer_holds_are_refused():
    for word in ("99999999999999999999", "9" * 5000):
        with pytest.raises(UserError, match=r"a token id must be in 0..8, got '9999"):
            IdsTokenizer(9).encode(f"1 {word}")
    np.testing.assert_array_equal(IdsTokenizer(9).encode("0" * 5000 + "7"), [7])


def test_bytes_are_utf8():
    tokenizer = BytesTokenizer()
    np.testing.assert_array_equal(tokenizer.encode("h\u00e9"), [0x68, 0xC3, 0xA9])
    assert tokenizer.vocab_size == 256
    assert tokenizer.decode([0x68, 0xC3]) == "h\ufffd"


@pytest.mark.parametrize(
    ("kind", "texts", "symbols"),
    [
        ("characters", ("banana", "e\u0301"), "aben\u0301"),  # sorted code points
        ("graphemes", (f"e\u0301e{FAMILY}\r\n",), ("\r\n", "e", "e\u0301", FAMILY)),  # clusters
        ("graphemes", ("e", "\u0301x"), ("e", "x", "\u0301")),  # which do not fuse over texts
    ],
)
def test_symbols_of_texts(kind, texts, symbols):
    tokenizer = build(kind, *texts)
    assert tokenizer.symbols == symbols
    for i, symbol in enumerate(symbols):
        assert tokenizer.encode(symbol).tolist() == [i]


def test_bpe_vocabulary_counts_gaps_and_added_tokens():
    model = of_letters({"a": 0, "b": 7})
    assert BpeTokenizer(model.to_str()).vocab_size == 8
    model.add_tokens(["c"])
    tokenizer = BpeTokenizer(model.to_str())
    assert tokenizer.vocab_size == max(model.get_vocab().values()) + 1


def test_bpe_of_a_file_keeps_special_tokens_and_ignores_limits(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer.from_str(BPE.definition)
    model.enable_truncation(3)
    model.enable_padding(length=500)
    model.save(str(path))
    tokenizer = build_tokenizer(TextConfig(tokenizer="bpe", tokenizer_path=str(path)), "unused")
    assert tokenizer == BpeTokenizer(path.read_text(encoding="utf-8"))
    text = f"{SAMPLE}<|end|>b"
    np.testing.assert_array_equal(tokenizer.encode(text), MODEL.encode(text).ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text


WITH_UNK = of_letters({"[UNK]": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], unk_token="[UNK]")


@pytest.mark.parametrize(
    ("tokenizer", "text", "symbols"),
    [
        (BytesTokenizer(), "a\udcffb", "bytes vocabulary, got '\\\\udcff'"),
        (CharactersTokenizer("ab"), "abzaz\ud800", "characters vocabulary, got 'z', '\\\\ud800'"),
        (GraphemesTokenizer(("a", "e")), "ae\u0301a", "graphemes vocabulary, got 'e\u0301'"),
        (BpeTokenizer(WITH_UNK.to_str()), "abz ab!", "bpe vocabulary, got 'z', '!'"),
        (BpeTokenizer(of_letters({"a": 0, "b": 1}).to_str()), "azb", "got 'z'"),  # the library drops it
        (BPE, "a\udcff", "bpe vocabulary, got '\\\\udcff'"),
        (DnaTokenizer(), "acgt\u00e9", "dna vocabulary, got '\u00e9'$"),
        (CharactersTokenizer("a"), "abcdefgh", "got 'b', 'c', 'd', 'e', 'f'$"),  # only the first ones
    ],
)
def test_symbols_outside_the_vocabulary(tokenizer, text, symbols):
    with pytest.raises(UserError, match=symbols):
        tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary(kind):
    tokenizer = build(kind, "abc")
    size = tokenizer.vocab_size
    for wrong in (-1, size):
        with pytest.raises(UserError, match=rf"ids must be in \[0, {size}\), got {wrong}"):
            tokenizer.decode([0, wrong])


WORKS = json.loads(of_letters({"a": 0, "b": 1, "ab": 2}, [("a", "b")]).to_str())
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def changed(**parts):
    return json.dumps(WORKS | parts).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"{}", "not a working Hugging Face"),
        (b"text", "not JSON"),
        (b"[" * 10**5, "lists and objects deep"),
        (changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precompiled"),
        (changed(normalizer={"type": "Sequence", "normalizers": [TENFOLD] * 9}), "at most 1024"),
        (changed(model=WORKS["model"] | {"vocab": {}, "merges": []}), "at least one piece"),
        (changed(model=WORKS["model"] | {"vocab": {"a": 2**31}, "merges": []}), "largest id"),
        (changed(model=WORKS["model"] | {"continuing_subword_prefix": "##"}), "slice index"),
        (changed(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "but WordLevel"),
        (changed(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size"),
        (changed(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}), "index out"),
        (b"\xff", "utf-8"),
    ],
)
def test_wrong_tokenizer_file(tmp_path, content, reason, capfd):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        tokenizer = build_tokenizer(TextConfig(tokenizer="bpe", tokenizer_path=str(path)), "text")
        tokenizer.decode(tokenizer.encode("a"))
    assert capfd.readouterr() == ("", "")  # a panic of the library writes to file descriptor 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kind": "byte"}, "did you mean 'bytes'"),
        ({"kind": "characters"}, "KeyError\\('symbols'\\)"),
        ({"kind": "graphemes", "symbols": 3}, "TypeError"),
        ({"kind": "bpe", "definition": "{}"}, "not a working Hugging Face"),
        ({"kind": "bpe", "definition": ["x"]}, "TypeError"),
        ({"kind": "characters", "symbols": "ba"}, "in ascending order"),
        ({"kind": "graphemes", "symbols": ["a", 3]}, "grapheme clusters"),
        ({"kind": "ids", "vocab_size": 10**30}, "in 2..16777216"),
    ],
)
def test_wrong_json(values, reason):
    with pytest.raises(UserError, match=reason):
        tokenizer_from_json(values)


def test_dna_has_the_ids_of_hyenadna():
    """Lower case marks repeats; other letters, the codes of ambiguous bases, are unknown."""
    tokenizer = build_tokenizer(TextConfig(tokenizer="dna"))
    ids = tokenizer.encode("ACGTNacgtnRy")
    assert ids.dtype == np.int32
    assert ids.tolist() == [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 6, 6]
    assert tokenizer.decode(ids) == "ACGTNACGTN[UNK][UNK]"
    assert tokenizer.decode(range(7)) == "[CLS][SEP][BOS][MASK][PAD][RESERVED][UNK]"
    assert tokenizer.stream()([7, 8]) == "AC"
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    assert tokenizer.encode("").shape == (0,)
    for text in ("AC\nGT", ">chr1", "\u00c4", "\u0131"):
        with pytest.raises(UserError, match="text must hold only symbols of the dna vocabulary"):
            tokenizer.encode(text)


def byte_fallback() -> BpeTokenizer:
    """Pieces as Gemma's: spaces as a visible symbol, bytes for what has no piece, specials first."""
    specials = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    byte_pieces = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = {piece: 259 + i for i, piece in enumerate(["\u2581", "a", "b", "ab"])}
    model = of_letters(specials | byte_pieces | pieces, [("a", "b")], byte_fallback=True)
    model.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(parts)
    model.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    return BpeTokenizer(model.to_str(), bos=2)


def test_a_prompt_begins_with_bos_and_other_texts_do_not():
    tokenizer = byte_fallback()
    ids = encode_start(tokenizer, "ab \u2603")
    assert ids.dtype == np.int32
    assert ids[0] == 2
    assert ids[1:].tolist() == [262, 259, *(3 + byte for byte in b"\xe2\x98\x83")]
    assert tokenizer.encode("ab \u2603").tolist() == ids[1:].tolist()
    assert tokenizer.decode(ids) == "ab \u2603"
    assert streamed(tokenizer, ids[:, None].tolist())[1] == "ab \u2603"
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    assert encode_start(BPE, "a").tolist() == BPE.encode("a").tolist()
    assert "bos" not in BPE.to_json()
    for wrong in (263, -1, "2", True):
        with pytest.raises(UserError, match="bos must be None or an id below vocab_size=263"):
            BpeTokenizer(tokenizer.definition, wrong)


def test_texts_to_train_on_begin_with_bos(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_fallback().definition)
    (tmp_path / "text.txt").write_text("ab " * 100)
    paths = {"path": str(tmp_path / "text.txt"), "tokenizer_path": str(tmp_path / "tokenizer.json")}
    corpus = load_corpus(TextConfig(**paths, tokenizer="bpe", bos=2, seq_len=4))
    assert corpus.train[0] == corpus.held_out[0] == corpus.prompt("ab")[0] == 2
    assert np.count_nonzero(corpus.train == 2) == 1
    # A loss of one bit for each token of the text, all of which are predicted.
    sums = dict.fromkeys(("correct", "probability"), 0.0) | {"nats": np.log(2) * corpus.n_held_out}
    found = corpus.metrics(sums | {"count": corpus.n_held_out})
    assert found["bits_per_byte"] == pytest.approx(corpus.n_held_out / corpus.held_out_bytes)
    with pytest.raises(UserError, match="bos must be None without tokenizer_path"):
        TextConfig(bos=2)
