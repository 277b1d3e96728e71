"""The code that published the weights, with random values in every tensor: run with -m interop."""

import io
import json

import grouped_heads
import numpy as np
import pytest
import yaml
from references import expected, logits_of_source, params_of, source_of
from safetensors.numpy import load_file

from hyena_jax import cli
from hyena_jax.config import TextConfig
from hyena_jax.data.tokenizers import IdsTokenizer, build_tokenizer, encode_start, tokenizer_from_json
from hyena_jax.interop import transformers_folder
from hyena_jax.interop.tensors import read_pytorch
from hyena_jax.system.errors import UserError

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")


def logits_of_transformers(folder, tokens):
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model(torch.as_tensor(tokens), use_cache=False).logits.numpy()


def assert_are_those(source, tokens, logits):
    assert np.abs(logits_of_source(source, tokens) - logits).max() < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["recurrentgemma", "lfm2", "olmo_hybrid"])
def test_transformers_loads_an_export(tmp_path, family):
    """At a length beyond the window: the export says one more, so that transformers sees the same keys."""
    source, export = source_of(family), tmp_path / "export"
    transformers_folder.write(export, source.model, params_of(source), IdsTokenizer(24), "card")
    for tokens, _ in expected(family):
        assert_are_those(source, tokens, logits_of_transformers(export, tokens))


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_more_heads_of_values_than_of_keys(tmp_path):
    grouped_heads.write_folder(tmp_path / "theirs")
    tokens, _ = expected("olmo_hybrid")[1]
    theirs = logits_of_transformers(tmp_path / "theirs", tokens)
    assert_are_those(source_of("olmo_hybrid", tmp_path / "theirs"), tokens, theirs)


def test_a_pytorch_file_is_read_as_safetensors_are(stored):
    file = stored("safari") / "model.safetensors"
    state = {f"model.{name}": torch.as_tensor(x) for name, x in load_file(file).items()}
    torch.save({"state_dict": state, "epoch": 3}, file.with_name("weights.ckpt"))
    assert_are_those(source_of("safari", file.with_name("weights.ckpt")), *expected("safari")[1])


def test_bfloat16_of_pytorch(tmp_path):
    values = torch.randn(3, 5).bfloat16()
    torch.save({"x": values, "y": values.T}, tmp_path / "x.pt")
    found = read_pytorch(tmp_path / "x.pt")
    np.testing.assert_array_equal(found["x"].read().astype(np.float32), values.float().numpy())
    np.testing.assert_array_equal(found["y"].read().astype(np.float32), values.T.float().numpy())


class Evil:
    """Unpickling it would run a command."""

    def __reduce__(self):
        return __import__("os").system, ("touch evil",)


def test_pickled_code_is_named_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.zeros(2), "y": Evil()}, "x.pt")
    with pytest.raises(UserError, match=r"it holds (posix|os|nt)\.system, which is not a tensor"):
        read_pytorch(tmp_path / "x.pt")
    assert not (tmp_path / "evil").exists()


def test_bytes_are_allowed_where_a_family_has_them(tmp_path):
    torch.save({"x": torch.zeros(2), "y._extra_state": io.BytesIO(b"fp8")}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="BytesIO, which is not a tensor"):
        read_pytorch(tmp_path / "x.pt")
    assert read_pytorch(tmp_path / "x.pt", (io.BytesIO,))["y._extra_state"].dtype == "BytesIO"


@pytest.mark.parametrize("keep", [0, 10, 300, -1])
def test_truncated_pytorch_files(tmp_path, keep):
    torch.save({"x": torch.zeros(200)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:keep])
    with pytest.raises(UserError, match="source .*x.pt"):
        read_pytorch(tmp_path / "x.pt")


def test_evo_2_s_config_is_yaml(stored, tmp_path):
    folder = stored("stripedhyena2")
    state = {name: torch.as_tensor(x) for name, x in load_file(folder / "model.safetensors").items()}
    state["blocks.0.projections._extra_state"] = io.BytesIO(b"fp8")
    torch.save(state, folder / "evo2.pt")
    (folder / "evo2.yml").write_text(yaml.safe_dump(json.loads((folder / "config.json").read_text())))
    command = ["convert", "stripedhyena2", folder / "evo2.pt", "--config", folder / "evo2.yml"]
    assert cli.main(list(map(str, [*command, "--output", tmp_path / "run"]))) == 0
    (folder / "evo2.yml").write_text("a: [")
    assert cli.main(list(map(str, [*command, "--output", tmp_path / "other"]))) == 2
    assert not (tmp_path / "other").exists()


def test_sentence_pieces(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")

    text = "the quick brown fox jumps over the lazy dog\n" * 50
    with open(tmp_path / "x.model", "wb") as file:
        options = {"vocab_size": 300, "hard_vocab_limit": False, "byte_fallback": True, "model_type": "bpe"}
        options |= {"normalization_rule_name": "identity", "minloglevel": 2}
        lines = iter(text.splitlines())
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **options)
    config = TextConfig(tokenizer="sentencepiece", tokenizer_path=str(tmp_path / "x.model"), bos=1)
    tokenizer = build_tokenizer(config)
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    for some in ("the lazy fox", "wörld ☃", "the"):
        ids = encode_start(tokenizer, some)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == some
        stream = tokenizer.stream()
        assert "".join([stream([i]) for i in ids] + [stream([], True)]).strip() == some
    with pytest.raises(UserError, match="not a working SentencePiece model"):
        tokenizer_from_json({"kind": "sentencepiece", "definition": "aaaa"})
    with pytest.raises(UserError, match="Incorrect padding|binascii|base64"):
        tokenizer_from_json({"kind": "sentencepiece", "definition": "a"})
