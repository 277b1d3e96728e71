"""What EleutherAI's harness asks of a run, without the harness; interop/test_harness.py runs its tasks."""

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from scoring.saved import saved_run
from tolerances import assert_close

from hyena_jax import scoring
from hyena_jax.config import AttentionConfig, LanguageModelConfig

OURS = "hyena_jax.scoring.harness"
THEIRS = ["", ".api", ".api.instance", ".api.model", ".models", ".models.utils", ".tasks", ".utils"]
MODEL = LanguageModelConfig(pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("harness"), MODEL)


@pytest.fixture
def harness(run, monkeypatch):
    stubs = {f"lm_eval{name}": MagicMock() for name in THEIRS}
    stubs["lm_eval.api.model"].TemplateLM = object
    stubs["lm_eval.models.utils"].normalize_gen_kwargs = lambda options, default_max_gen_toks: options
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    # With the stubs it is imported anew, and forgotten after the test.
    monkeypatch.setattr(scoring, "harness", None, raising=False)
    monkeypatch.setitem(sys.modules, OURS, None)
    del sys.modules[OURS]
    return importlib.import_module(OURS).HarnessModel(run, batch_size=2)


def test_a_continuation_is_scored_and_its_context_is_not(harness, run):
    context, text = (run.tokenizer.encode(text).tolist() for text in ("the c", "at"))
    logits = jax.jit(run.model.apply)({"params": run.params}, np.array([context + text], np.int32))
    log_probs = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)
    expected = [log_probs[len(context) - 1 + i, symbol] for i, symbol in enumerate(text)]
    (found, _), (first, _) = harness._loglikelihood_tokens([(None, context, text), (None, context, text[:1])])
    assert_close(found, np.sum(expected), "float32")
    assert_close(first, expected[0], "float32")


def test_samples_of_one_context_have_seeds_of_their_own(harness):
    options = {"max_gen_toks": 6, "until": [], "do_sample": True}
    first, second = harness.generate_until([SimpleNamespace(args=("the", options))] * 2)
    assert first != second
    assert harness.generate_until([SimpleNamespace(args=("the", options))]) == [first]
