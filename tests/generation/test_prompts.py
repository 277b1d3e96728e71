"""A row ends where its text first contains a stop; other rows are unaffected."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from test_decoding import RAGGED, drawn, model

from hyena_jax.cli.generate import Generate
from hyena_jax.data.tokenizers import BytesTokenizer, CharactersTokenizer, DnaTokenizer, IdsTokenizer
from hyena_jax.generation import decoding, saved_state
from hyena_jax.generation.decoding import Request, generate
from hyena_jax.generation.prompts import StopTexts, stops
from hyena_jax.ops.online_conv import TILE
from hyena_jax.system.errors import UserError

pytestmark = pytest.mark.xdist_group("decoding")  # they share compiled programs with test_decoding
LETTERS = CharactersTokenizer("abcdefghijk")
OPTIONS = {"n_tokens": 2 * TILE + 1, "seed": 1, "n_samples": 2}


def end_of(tokens, texts):
    """By definition: the shortest prefix of the text that contains a stop."""
    text = LETTERS.decode(tokens)
    ends = [text.index(stop) + len(stop) for stop in texts if stop in text]
    return min(ends, default=len(text))


@pytest.mark.parametrize(("at", "length"), [(0, 2), (7, 5), (TILE - 1, 3), (TILE + 3, 5)])
def test_rows_end_after_their_stop_texts(at, length):
    free = drawn("hyena", RAGGED, **OPTIONS)
    stop = LETTERS.decode(free[1].tokens[at : at + length])
    ends = [end_of(row.tokens, [stop]) for row in free]
    assert ends[1] <= at + length
    stopped = drawn("hyena", RAGGED, **OPTIONS, stop_texts=StopTexts(LETTERS, (stop, "kkkkkkkk")))
    for before, after, end in zip(free, stopped, ends, strict=True):
        np.testing.assert_array_equal(after.tokens, before.tokens[:end])
        np.testing.assert_array_equal(after.log_probs, before.log_probs[:end])


@pytest.mark.wide
def test_stops_hold_when_a_full_context_slides():
    options = {"max_len": 16, "n_tokens": 60, "seed": 2}
    (free,) = drawn("hyena", [[3]], **options)
    stop = LETTERS.decode(free.tokens[40:44])
    (stopped,) = drawn("hyena", [[3]], **options, stop_texts=StopTexts(LETTERS, (stop,)))
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: end_of(free.tokens, [stop])])


def test_pieces_end_once_every_row_has_stopped():
    free = drawn("hyena", RAGGED, **OPTIONS)
    stop_texts = StopTexts(LETTERS, tuple(LETTERS.decode(row.tokens[2:6]) for row in free))
    prompts = [np.array(prompt) for prompt in RAGGED]
    request = Request(**OPTIONS, stop_texts=stop_texts)
    assert len(list(generate(*model("hyena"), prompts, request))) == 2


def test_a_text_may_begin_in_one_piece_and_end_in_the_next():
    watch = StopTexts(BytesTokenizer(), ("ROMEO:", "ß")).watch(np.zeros(0, np.int32))
    assert watch(list(b"JULIET ROM")) is None
    assert watch(list(b"E")) is None
    assert watch(list(b"O: but soft")) == 2
    halves = StopTexts(BytesTokenizer(), ("ß",)).watch(np.zeros(0, np.int32))
    first, second = "ß".encode()
    assert halves([first]) is None
    assert halves([second, 65]) == 1


def test_one_token_stops_on_the_device_and_what_cannot_come_is_refused():
    ids, watched = stops(LETTERS, ["c", "abc"])
    assert (ids, watched.texts) == ((2,), ("c", "abc"))
    assert stops(LETTERS, []) == ((), None)
    assert stops(IdsTokenizer(30), ["17"]) == ((17,), None)
    for tokenizer, text in ((LETTERS, ""), (LETTERS, "z"), (IdsTokenizer(30), "1 2")):
        with pytest.raises(UserError, match="stop"):
            stops(tokenizer, [text])


@pytest.mark.parametrize("state", [None, Path("state")])
def test_a_prompt_begins_with_bos_unless_it_goes_on_from_a_state(state, monkeypatch):
    read = []
    monkeypatch.setattr(saved_state, "origin", lambda *_: None)
    monkeypatch.setattr(saved_state, "load_state", lambda *_: Mock(read=[0]))
    monkeypatch.setattr(decoding, "prefill", lambda _, __, prompts, *___: read.extend(prompts))
    run = Mock(tokenizer=Mock(bos=7, encode=lambda text: np.int32([1, 2])))
    Generate(Path("run"), prompt=("ab",), load_state=state)._prefilled(run)
    np.testing.assert_array_equal(read, [[7, 1, 2] if state is None else [1, 2]])


def test_stops_of_dna_are_found_in_either_case():
    ids, watched = stops(DnaTokenizer(), ["acg"])
    assert (ids, watched.watch(np.int32([]))(DnaTokenizer().encode("TACGT"))) == ((), 4)
