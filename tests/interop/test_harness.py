"""A run and its export to transformers reach the same figures in EleutherAI's harness."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hyena_jax
from hyena_jax import cli
from hyena_jax.data.tokenizers import BpeTokenizer, decode_after
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.interop import lfm2, recurrentgemma
from hyena_jax.system.errors import UserError

pytestmark = pytest.mark.interop
pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("accelerate", reason="the extra interop is not installed")
harness = pytest.importorskip("hyena_jax.scoring.harness")
Instance = pytest.importorskip("lm_eval.api.instance").Instance
STORED = Path(__file__).parent / "stored"

DOCUMENTS = [
    {
        "question": f"The cat number {i} sat on the mat and looked at {i * i} birds. What then?",
        "choices": ["It flew away.", "It sat there.", "It ate them all"],
        "label": i % 3,
    }
    for i in range(12)
]
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{question}} {{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(folder / "rows.jsonl")}}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**about, **task}))
    return folder


def tokenizer():
    """Bytes as pieces, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return BpeTokenizer(made.to_str())


@pytest.fixture(scope="module", params=["lfm2", "recurrentgemma"])
def run_and_export(request, tmp_path_factory):
    """A run, converted from a model of transformers with random weights, and its export."""
    import torch
    import transformers

    folder, family = tmp_path_factory.mktemp(request.param), request.param
    settings = json.loads((STORED / family / "config.json").read_text())
    settings |= {"vocab_size": 260, "max_position_embeddings": 128}
    torch.manual_seed(0)
    kind = {"lfm2": transformers.Lfm2Config, "recurrentgemma": transformers.RecurrentGemmaConfig}[family]
    model = transformers.AutoModelForCausalLM.from_config(kind(**settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text(tokenizer().definition)
    run, export = folder / "run", folder / "export"
    command = ["convert", family, folder / "source", "--output", run, "--max-len", 128]
    assert cli.main(list(map(str, command))) == 0
    command = ["export", run, "--output", export, "--format", "transformers"]
    with pytest.MonkeyPatch.context() as patch:  # an export without an end token is one that lm-eval refuses
        module = {"lfm2": lfm2, "recurrentgemma": recurrentgemma}[family]
        patch.setattr(module, "RELEASED_VOCABULARY", settings["vocab_size"])
        assert cli.main(list(map(str, command))) == 0
        yield hyena_jax.load_run(run, quiet=True), export


def test_figures_are_those_of_the_export(run_and_export, tasks, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    run, export = run_and_export
    ours = harness.evaluate(run, [str(tasks)], batch_size=5)["results"]
    theirs = HFLM(str(export), backend="causal", device="cpu", dtype="float32", max_length=128, batch_size=5)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = simple_evaluate(theirs, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)["results"]
    assert ours.keys() == expected.keys() == TASKS.keys()
    for task in TASKS:
        for name, value in expected[task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_requests_equal_those_of_the_export(run_and_export):
    """Log-likelihoods, whether they are greedy, and continuations, one by one."""
    from lm_eval.models.huggingface import HFLM

    run, export = run_and_export
    theirs = HFLM(str(export), backend="causal", device="cpu", dtype="float32", max_length=128, batch_size=3)
    ours = harness.HarnessModel(run, 3)

    def requests(kind, *arguments):
        return [Instance(kind, {}, some, i) for i, some in enumerate(arguments)]

    texts = ("A cat", " sat"), ("", "Nothing before"), ("Long " * 60, "end"), ("x ", "y")
    pairs = requests("loglikelihood", *texts)
    for (a, is_a), (b, is_b) in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert (a, is_a) == (pytest.approx(b, rel=1e-4), is_b)
    texts = requests("loglikelihood_rolling", ("short",), ("a text of several windows " * 12,))
    for a, b in zip(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    greedy = {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = requests("generate_until", *((text, greedy) for text in ("A cat", "Two birds", "Long " * 60)))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def test_samples_of_one_context_differ_and_do_not_depend_on_the_batch(run_and_export):
    drawn = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    once = Instance("generate_until", {}, ("A cat", drawn), 0)
    other = Instance("generate_until", {}, ("Birds", drawn), 1)
    found = [
        harness.HarnessModel(run_and_export[0], size).generate_until([once] * 4 + [other]) for size in (1, 5)
    ]
    assert found[0] == found[1]
    assert len({*found[0][:4]}) > 1


def test_a_text_ends_at_the_token_of_its_end(run_and_export):
    model = harness.HarnessModel(run_and_export[0])
    prompt = np.array(model.tok_encode("A cat"))
    request = model.run.request(6, SamplingRule(greedy=True))
    ids = model.run.continuations([prompt], request)[0].tokens
    model.end = int(ids[3])
    text = decode_after(model.tokenizer_, prompt, ids[: ids.tolist().index(ids[3])])
    options = {"until": [], "max_gen_toks": 6, "do_sample": False}
    assert model.generate_until([Instance("generate_until", {}, ("A cat", options), 0)]) == [text]


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 4), ("repetition_penalty", 1.2), ("typical_p", 0.5)]
)
def test_options_that_would_change_the_text_are_refused(run_and_export, name, value):
    options = {"until": [], "max_gen_toks": 6, "do_sample": False, name: value}
    request = Instance("generate_until", {}, ("A", options), 0)
    with pytest.raises(UserError, match=f"{name} of the task's generation_kwargs must be .*, got {value}"):
        harness.HarnessModel(run_and_export[0]).generate_until([request])


def test_the_command(run_and_export, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    run, output = str(run_and_export[0].workdir), tmp_path / "found.json"
    assert cli.main(["eval", run, "--tasks", str(tasks), "--limit", "4", "--output", str(output)]) == 0
    assert "local_choice" in capsys.readouterr().out
    assert json.loads(output.read_text())["n-samples"]["local_choice"]["effective"] == 4
    assert cli.main(["eval", run, "--tasks", "no_such_task"]) == 2
    assert "--tasks 'no_such_task' is unknown" in capsys.readouterr().err


def test_tasks_that_the_harness_cannot_run_are_one_line(run_and_export, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    run = str(run_and_export[0].workdir)
    for name, text in {
        "template": (tasks / "local_choice.yaml").read_text().replace("{{question}}", "{{"),
        "yaml": "task: [",
        "exit": (tasks / "local_choice.yaml").read_text() + "process_docs: !function own.leave\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text("def leave(documents): raise SystemExit(0)")
        (tmp_path / name / "a.yaml").write_text(text)
        assert cli.main(["eval", run, "--tasks", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("hyena-jax: error: --tasks") == 1
    for name in ("*", "", "x" * 300):
        assert cli.main(["eval", run, "--tasks", name]) == 2
        assert "is unknown" in capsys.readouterr().err
