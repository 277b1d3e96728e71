"""`convert`: a published model as a run folder, at step 0. Nothing is written unless all of it fits.

Parameters are made one at a time and written in blocks, so memory holds about the largest tensor.
"""

import io
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.config import Experiment, LanguageModelConfig, TextConfig, TokensConfig
from hyena_jax.data.text import fingerprint_of_no_text
from hyena_jax.data.tokenizers import IdsTokenizer, Tokenizer, read_bpe, read_sentencepiece
from hyena_jax.interop import lfm2, olmo_hybrid, recurrentgemma, rwkv7, safari, stripedhyena2
from hyena_jax.interop.family import Options, Source
from hyena_jax.interop.tensors import DTYPES, Tensors, read_tensors
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, printable, require
from hyena_jax.system.files import require_free
from hyena_jax.system.trees import named_leaves
from hyena_jax.training.checkpoint import Streamed, save_streamed
from hyena_jax.training.folder import CHECKPOINTS, write_description
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import TrainState, init_params, init_state

FORMATS: Mapping[str, Callable[[Path, Tensors, Options], Source]] = {
    "recurrentgemma": recurrentgemma.read,
    "lfm2": lfm2.read,
    "olmo_hybrid": olmo_hybrid.read,
    "safari": safari.read,
    "hyenadna": safari.read_hyenadna,
    "stripedhyena2": stripedhyena2.read,
    "rwkv7": rwkv7.read,
}
OBJECTS = {"stripedhyena2": (io.BytesIO,)}
"""What PyTorch files of a family hold besides tensors: the statistics of Transformer Engine, bytes."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
RECORD = "conversion.json"
ROW_LEN = 2048
"""Tokens of a row that the new run would train on or evaluate at a time, if its model reads as many."""
MAX_PROBLEMS = 5
AT_ONCE = 2**24
"""Numbers that are compared at a time."""


class Converted(NamedTuple):
    """What was written."""

    experiment: Experiment
    n_tensors: int
    n_parameters: int
    tokenizer: Tokenizer
    note: str | None
    """See `Source`."""


def convert(
    family: str, source: Path, output: Path, options: Options, tokenizer_path: Path | None = None
) -> Converted:
    """Writes the run folder `output` from a published model.

    Args:
      family: one of FORMATS.
      source: the file or folder with the weights.
      output: a folder that does not exist, or is empty; nothing is written if a tensor does not fit.
      tokenizer_path: a tokenizer to use instead of the one in the folder `source`.
    """
    require_free("output", output)
    require(source.exists() or source.is_symlink(), "source", str(source), "a file or a folder that exists")
    found = FORMATS[family](source, read_tensors(source, OBJECTS.get(family, ())), options)
    names = [name for transform in found.table.transforms.values() for name in transform.names]
    missing = [name for name in dict.fromkeys(names) if name not in found.tensors]
    if len(missing) > max(MAX_PROBLEMS, len(found.tensors)):  # before a model of that size is traced
        listed = f"{', '.join(missing[:MAX_PROBLEMS])} and {len(missing) - MAX_PROBLEMS:,} more"
        raise UserError(f"does not fit its config: the tensors {listed} are missing", "source")
    tokenizer, tokenizer_file = _tokenizer(found, source, tokenizer_path)
    kept = None if tokenizer_file is None else output.absolute() / tokenizer_file.name
    experiment = Experiment(model=found.model, data=_data(tokenizer, kept, found.model))
    shapes = jax.eval_shape(partial(init_params, models.build(found.model), 0))
    problems = list(_problems(found, named_leaves(shapes)))
    if problems:
        rest = len(problems) - MAX_PROBLEMS
        listed = "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
        raise UserError(f"source {str(source)!r} does not fit: {listed}")
    n_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    with files.new_folder(output) as draft:
        about = {"fingerprint": fingerprint_of_no_text(tokenizer), "tokenizer": tokenizer.to_json()}
        write_description(draft, experiment, about)
        if kept is not None:  # for new runs with this config; the run itself has it in data.json
            shutil.copyfile(tokenizer_file, draft / kept.name)
        _write_checkpoint(draft / CHECKPOINTS, experiment, shapes, found)
        record = {"format": family, "source": str(source), "tensors": len(found.tensors)}
        record["parameters"] = n_parameters
        files.write_text(draft / RECORD, json.dumps(record, indent=2) + "\n")
    return Converted(experiment, len(found.tensors), n_parameters, tokenizer, found.note)


def _tokenizer(found: Source, source: Path, given: Path | None) -> tuple[Tokenizer, Path | None]:
    """The given tokenizer, or one next to the weights, and its file; else ids are their own text."""
    if found.tokenizer is not None:
        require(given is None, "tokenizer", str(given), "None: the tokens of this family are known")
    path, tokenizer = None, found.tokenizer or IdsTokenizer(found.model.vocab_size)
    if found.tokenizer is None:
        near = ((source if source.is_dir() else source.parent) / name for name in TOKENIZER_FILES)
        path = given or next((path for path in near if path.is_symlink() or path.exists()), None)
        require(path is None or not path.is_symlink(), "tokenizer", str(path), "a file, not a symbolic link")
    if path is not None:
        tokenizer = (read_bpe if path.suffix == ".json" else read_sentencepiece)(str(path), found.bos)
    size, most = tokenizer.vocab_size, found.model.vocab_size
    require(
        size <= most, f"the size of the tokenizer ({tokenizer.kind})", size, f"at most the model's {most}"
    )
    return tokenizer, path


def _data(tokenizer: Tokenizer, path: Path | None, model: LanguageModelConfig) -> TextConfig | TokensConfig:
    """The config of data for this tokenizer, whose file will be at `path`."""
    length = min(model.max_len, ROW_LEN)
    if tokenizer.kind == "ids":
        return TokensConfig(vocab_size=tokenizer.vocab_size, seq_len=length)
    path, bos = (None, None) if path is None else (str(path), tokenizer.bos)
    return TextConfig(tokenizer=tokenizer.kind, tokenizer_path=path, bos=bos, seq_len=length)


def _problems(found: Source, parameters: Mapping[str, Any]) -> Iterator[str]:
    table, tensors = found.table, found.tensors
    yield from (f"the parameter {path} has no source" for path in parameters.keys() - table.transforms.keys())
    used: set[str] = set()
    for path, transform in table.transforms.items():
        # No memory: every element is the same zero.
        zeros = np.broadcast_to(np.zeros((), np.float32), parameters[path].shape)
        for name, theirs in zip(transform.names, transform.write(zeros), strict=True):
            if name in used:
                continue
            used.add(name)
            if name not in tensors:
                yield f"the tensor {name} {theirs.shape} is missing"
            else:
                yield from _misfit(name, tensors, theirs.shape)
    others = {name: tensors[name] for name in table.copies.keys() | table.constants.keys() if name in tensors}
    for name in others:
        original = table.copies.get(name)
        if original is not None and (original not in tensors or tensors[original].dtype not in DTYPES):
            continue  # the original has its line
        shape = table.constants[name].shape if original is None else tensors[original].shape
        wrong = list(_misfit(name, tensors, shape))
        yield from wrong
        if wrong:
            continue
        if original is None:
            constant = table.constants[name]
            differences = np.abs(tensors[name].read().astype(np.float64) - constant)
            if not (differences <= 1e-4 * np.abs(constant).max(initial=0.0)).all():
                yield f"the tensor {name} must be the constant that the config implies, and differs from it"
        elif not _in_all_rows(np.array_equal, tensors[name].read(), tensors[original].read()):
            yield f"the tensor {name} must equal {original}, which the model shares"
    for name in tensors.keys() - used - others.keys():
        if not (table.ignored and table.ignored.fullmatch(name)):
            yield f"the tensor {printable(name)} {tensors[name].shape} is unexpected"


def _misfit(name: str, tensors: Tensors, shape: tuple[int, ...]) -> Iterator[str]:
    tensor = tensors[name]
    if tensor.shape != shape:
        yield f"the tensor {name} must be {shape} by the config, got {tensor.shape}"
    elif tensor.dtype not in DTYPES:
        yield f"the tensor {name} must be of dtype {', '.join(DTYPES)}, got {printable(tensor.dtype)}"


def _in_all_rows(is_so: Callable[..., bool], *arrays: np.ndarray) -> bool:
    """Whether it is so of arrays of one shape, of AT_ONCE numbers at a time."""
    n_rows = max(1, AT_ONCE // max(1, math.prod(arrays[0].shape[1:])))
    return all(is_so(*(x[i : i + n_rows] for x in arrays)) for i in range(0, len(arrays[0]), n_rows))


def _write_checkpoint(folder: Path, experiment: Experiment, shapes: Any, found: Source) -> None:
    """Step 0. The optimizer's state is that of one-number placeholders: what has a parameter's shape is 0."""
    small = jax.tree.map(lambda leaf: np.zeros((1,) * len(leaf.shape), leaf.dtype), shapes)

    def state(params: Any) -> TrainState:
        return init_state(params, make_optimizer(experiment.optimizer, params, experiment.training.steps))

    wanted = jax.eval_shape(state, shapes).to_items()
    placeholders = jax.device_get(state(small)).to_items()
    params = {path: partial(_blocks, found, path, leaf.dtype) for path, leaf in named_leaves(shapes).items()}
    moments = {}
    for path, leaf in named_leaves(wanted["train_state"]).items():
        few = named_leaves(placeholders["train_state"])[path]
        if few.shape != leaf.shape:
            require(not few.any(), f"the optimizer's initial {path}", few, "0")
            moments[path] = partial(_zeros, leaf)
    items = {
        "params": Streamed(wanted["params"], placeholders["params"], params),
        "train_state": Streamed(wanted["train_state"], placeholders["train_state"], moments),
    }
    save_streamed(folder, items)


def _blocks(found: Source, path: str, dtype: np.dtype, n_rows: int) -> Iterator[np.ndarray]:
    """A parameter's rows; UserError with the tensor's name if a number is not finite."""
    transform, tensors = found.table.transforms[path], found.tensors
    whole = transform.read(*(tensors[name].read() for name in transform.names))
    for first in range(0, len(whole), n_rows):
        with np.errstate(over="ignore"):
            block = np.ascontiguousarray(whole[first : first + n_rows], dtype)
        if not np.isfinite(block).all():
            read = ((name, tensors[name].read()) for name in transform.names)
            wrong = [name for name, x in read if not _in_all_rows(lambda x: np.isfinite(x).all(), x)]
            raise UserError(
                f"the tensor {(wrong or transform.names)[0]} must be finite as {dtype}, and as {path}"
            )
        yield block


def _zeros(leaf: Any, n_rows: int) -> Iterable[np.ndarray]:
    block = np.zeros((min(n_rows, leaf.shape[0]), *leaf.shape[1:]), leaf.dtype)
    return (block[: leaf.shape[0] - first] for first in range(0, leaf.shape[0], n_rows))
