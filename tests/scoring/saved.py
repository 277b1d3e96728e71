"""A run of tiny size that was saved before its first step."""

import jax

import hyena_jax
from hyena_jax import models
from hyena_jax.data.dataset import load
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.folder import CHECKPOINTS, write_description
from hyena_jax.training.step import init_params


def saved_run(folder, model, text="the cat sat on the mat. " * 60, tokenizer="bytes", seq_len=16):
    (folder / "run").mkdir()
    (folder / "text.txt").write_text(text)
    sizes = {"seq_len": seq_len, "batch_size": 4}
    config = hyena_jax.TextConfig(path=str(folder / "text.txt"), tokenizer=tokenizer, **sizes)
    data = load(config)
    experiment = data.complete(hyena_jax.Experiment(model=model, data=config))
    write_description(folder / "run", experiment, data.to_json())
    params = jax.device_get(init_params(models.build(experiment.model), 0))
    with Checkpoints(folder / "run" / CHECKPOINTS, 1, print) as checkpoints:
        checkpoints.save(Meta(0), {"params": params})
    return hyena_jax.load_run(folder / "run")
