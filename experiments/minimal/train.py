"""Trains a small Hyena on the source code of Python's standard library: one file, to copy and change.

    python experiments/minimal/train.py [--workdir runs/minimal] [--steps 600]

Model, data and `generate` are the library's; loss, optimizer, step and loop are written here. The losses are
those of `hyena-jax train quickstart`, bit for bit. After a kill, the same command continues from the newest
checkpoint; other settings need another workdir.

Axes: N devices, B rows (of a batch, or of a device's part of it), L length, V vocabulary.
"""

import argparse
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax import data, models
from hyena_jax.config import HyenaConfig, LanguageModelConfig, TextConfig
from hyena_jax.generation.decoding import Request, continuations, generate

SEED = 0  # of the parameters, the order of the data, dropout and the sample

# Data: TextConfig(path="my_text.txt", ...) reads your own file or folder.
SEQ_LEN = 128
BATCH_SIZE = 16  # over all devices
DATA = TextConfig(name="python_stdlib", tokenizer="bytes", seq_len=SEQ_LEN, batch_size=BATCH_SIZE)

# Model: the mixers of the first layers, repeated up to N_LAYERS; any of hyena_jax.config will do.
MIXERS = (HyenaConfig(),)
N_LAYERS, D_MODEL, D_FF = 3, 128, 512
DROPOUT = 0.0
DTYPE = "float32"  # of activations, or "bfloat16"; parameters stay in float32

# Optimizer: AdamW with clipping, a linear warm-up and a cosine decay.
LEARNING_RATE, FINAL_FRACTION, WARMUP_STEPS = 2e-3, 0.1, 50
POSITIONS_LEARNING_RATE = 1e-5  # of the positional features of Hyena's filters
B1, B2, EPS = 0.9, 0.99, 1e-8
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
NO_DECAY = re.compile(r"/filter/|/(bias|scale|skip|short_taps|short_bias)$")  # in a parameter's path

# Loop
STEPS = 600
LOG_EVERY, EVAL_EVERY, CHECKPOINT_EVERY = 10, 100, 200
EVAL_BATCH_SIZE, EVAL_ROWS = 64, 200  # evenly spaced held-out rows; EVAL_ROWS = None takes all
PROMPT, SAMPLE_TOKENS = "def ", 300


def nats(logits, targets):
    """Negative log-likelihoods [B, L] of targets [B, L] under logits [B, L, V]."""
    of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_targets  # optax's differs in the last bits


def make_optimizer(params, steps):
    """AdamW, in which some parameters do not decay, and positions learn slowly."""
    paths = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )
    decays = jax.tree.map(lambda path: not NO_DECAY.search(path), paths)
    is_position = jax.tree.map(lambda path: path.endswith("/filter/positions"), paths)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        decay_steps=max(steps, WARMUP_STEPS + 1),
        end_value=FINAL_FRACTION * LEARNING_RATE,
    )
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(B1, B2, EPS),
        optax.add_decayed_weights(WEIGHT_DECAY, decays),
        optax.masked(optax.scale(POSITIONS_LEARNING_RATE / LEARNING_RATE), is_position),
        optax.scale(-1.0),
        optax.scale_by_schedule(schedule),
    )


def make_steps(model, optimizer):
    """The steps of training and evaluation, mapped over the devices; batches are [N, B, L].

    Each device computes the gradient of its own rows, and applies the mean of all to its copy of the state.
    """

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(SEED), state["step"])
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))

        def loss_fn(params):
            rngs = {"dropout": key}
            logits = model.apply({"params": params}, batch["inputs"], deterministic=False, rngs=rngs)
            return nats(logits, batch["targets"]).mean()

        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(state["params"]), "data")
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}, loss

    def eval_step(params, batch):
        """The sum of the losses, and the number of targets; padding has weight 0."""
        losses = nats(model.apply({"params": params}, batch["inputs"]), batch["targets"])
        return jax.lax.psum(((losses * batch["weights"]).sum(), batch["weights"].sum()), "data")

    mapped = {"axis_name": "data", "in_axes": (None, 0), "out_axes": None}
    return jax.pmap(train_step, donate_argnums=0, **mapped), jax.pmap(eval_step, **mapped)


def train(workdir, steps):
    """Trains to step `steps`, from the newest checkpoint in `workdir` if any; returns the logged losses."""
    text = data.load(DATA)
    vocab_size = text.tokenizer.vocab_size
    config = LanguageModelConfig(
        pattern=MIXERS,
        n_layers=N_LAYERS,
        d_model=D_MODEL,
        d_ff=D_FF,
        max_len=SEQ_LEN,
        vocab_size=vocab_size,
        dropout=DROPOUT,
        dtype=DTYPE,
    )
    model, devices = models.build(config), jax.devices()
    params = jax.jit(model.init)(jax.random.key(SEED), jnp.zeros((1, SEQ_LEN), jnp.int32))["params"]
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{text.source}; {n_params:,} parameters; {len(devices)} x {devices[0].device_kind}")

    optimizer = make_optimizer(params, steps)
    train_step, eval_step = make_steps(model, optimizer)
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": jax.jit(optimizer.init)(params)}
    everywhere = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    state = jax.device_put(state, everywhere)  # a copy on every device

    def split(batch):
        return jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), batch)

    # Orbax writes in the background; a save that a kill cuts short does not count, and is removed.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    losses = {}
    with ocp.CheckpointManager(workdir.absolute(), options=options) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start > 0:
            state = checkpoints.restore(start, args=ocp.args.StandardRestore(state))
            print(f"continuing after step {start}")
        batches = data.batches(text, BATCH_SIZE, SEED, start)  # batch t depends on SEED and t alone
        timed, began = start, time.perf_counter()
        for step in range(start + 1, steps + 1):
            _, batch = next(batches)
            state, loss = train_step(state, split(batch))
            is_last = step == steps
            if step % LOG_EVERY == 0 or is_last:
                losses[step] = loss.item()  # waits for the devices
                ms = 1e3 * (time.perf_counter() - began) / (step - timed)
                print(f"step {step:4d}  loss {losses[step]:.4f}  {ms:.0f} ms per step", flush=True)
            if step % EVAL_EVERY == 0 or is_last:
                held_out = text.eval_batches(EVAL_BATCH_SIZE, EVAL_ROWS)
                sums = [eval_step(state["params"], split(batch)) for batch in held_out]
                total, count = np.sum(sums, axis=0, dtype=np.float64)
                print(f"step {step:4d}  held-out loss {total / count:.4f}", flush=True)
            if step % CHECKPOINT_EVERY == 0 or is_last:
                checkpoints.save(step, args=ocp.args.StandardSave(state))
            if step % LOG_EVERY == 0 or step == start + 1:  # compiling, evaluating and saving do not count
                timed, began = step, time.perf_counter()

    prompt = text.prompt(PROMPT)
    request = Request(SAMPLE_TOKENS, seed=SEED, n_symbols=vocab_size)
    (sample,) = continuations(generate(model, jax.device_get(state["params"]), [prompt], request))
    print(text.tokenizer.decode(np.append(prompt, sample.tokens)))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/minimal"))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    train(arguments.workdir, arguments.steps)
