"""Plants silent faults in copies of the checkout, one at a time, and says which test catches each.

python tests/programs/faults_planted.py [NAME ...] [--list] [--jobs N] [--whole] [--limit S] [--output FILE]

A fault is one line of the package as a careful person might have got it wrong: the program still runs, and
gives wrong results or breaks a promise. What the tests miss here, they would miss in a change as well.

For each fault the tracked files are copied into a temporary folder and the line is changed there. The tests
of the file's part of the package run first, those named after the file before the others, until one fails;
with --whole the whole suite follows where none did. Both take the marks that pytest takes by default. A run
of pytest that takes longer than --limit seconds is ended, and the fault counts as caught by the time limit:
raise it on a busy machine. --jobs faults are tried at the same time. --list only checks the faults: each must
be found exactly once in its file, and the changed file must compile.

With --output each result is appended to FILE as a line of JSON; faults that are in it already are not tried
again, but with --whole those are that only their own tests have missed. A table in Markdown is printed at the
end. The exit code is 1 if a fault is not found in its file, or if its tests could not be run.
The fault `unharmed` changes nothing: a test of the whole suite that catches it fails in every copy.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PYTEST = "-m pytest -x -q -p no:cacheprovider --no-header -rfE".split()
HUNG = "the time limit"
NO_TESTS = 5
"""Pytest's exit code if the marks leave none."""
ELSEWHERE = {
    "cli": ("tests/test_cli.py", "tests/test_command_line.py", "tests/test_launch.py"),
    "config": ("tests/test_config.py", "tests/test_command_line.py", "tests/test_parameters.py"),
    "parallel": ("tests/training",),
    "api.py": ("tests/test_api.py",),
}
"""Tests of the parts of the package that have no folder of their own in tests."""
Row = dict[str, Any]


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """What stands there, exactly once in the file."""
    new: str
    says: str
    """What is wrong, in some words."""
    tests: tuple[str, ...] = ()
    """Tests that run with those of the file's part."""


class NotFound(Exception):
    pass


def harmed(fault: Fault) -> str:
    """The text of the fault's file with the fault in it, which compiles."""
    text = (ROOT / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise NotFound(f"{fault.name}: {text.count(fault.old)} times in {fault.file}: {fault.old!r}")
    text = text.replace(fault.old, fault.new)
    try:
        compile(text, fault.file, "exec")
    except SyntaxError as error:
        raise NotFound(f"{fault.name}: {fault.file} no longer compiles: {error}") from error
    return text


def own_tests(fault: Fault) -> Iterable[list[str]]:
    """Arguments of pytest: for the files named after the fault's file, then for the others of its part."""
    part, *rest = Path(fault.file).relative_to("hyena_jax").parts
    others = ELSEWHERE.get(part)
    if others is None:
        folder = ROOT / "tests" / Path(part, *rest).parent
        folder = next(path for path in (folder, *folder.parents) if path.is_dir())
        others = (str(folder.relative_to(ROOT)),)
    named = [
        str(path.relative_to(ROOT))
        for other in others
        for path in sorted((ROOT / other).rglob(f"test_*{Path(fault.file).stem}*.py"))
    ]
    first = list(dict.fromkeys([*named, *(path for path in fault.tests if path.endswith(".py"))]))
    rest = [path for path in (*fault.tests, *others) if path not in first]
    return filter(None, (first, [*rest, *(f"--ignore={path}" for path in first)]))


def copied(folder: Path, fault: Fault) -> Path:
    """A copy of the tracked files in `folder`, with the fault."""
    text = None if fault == UNHARMED else harmed(fault)
    checkout = folder / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    if (ROOT.parent / "shared").exists():  # corpora that some tests look for beside the checkout
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    if text is not None:
        (checkout / fault.file).write_text(text)
    return checkout


def first_failure(checkout: Path, tests: Sequence[str], workers: int, limit: float) -> str | None:
    """The first test that fails, or HUNG; None if all pass."""
    log = checkout.parent / "log"
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, *PYTEST, "-n", str(workers), *tests],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            return HUNG
        finally:  # what tests have started may outlive them
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    said = log.read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if found is not None:
        return re.sub(r"@\w+$", "", found[1])  # the group that pytest-xdist appends
    if child.returncode not in (0, NO_TESTS):
        raise RuntimeError(f"pytest ended with exit code {child.returncode}: {said.strip()[-300:]}")
    return None


def tried(fault: Fault, whole: bool, limit: float, before: Row | None) -> Row:
    """The row of a fault: `caught` is a test, HUNG, or None if it was missed."""
    start, caught, error = time.monotonic(), None, None
    try:
        with tempfile.TemporaryDirectory(prefix="hyena_jax_fault_", ignore_cleanup_errors=True) as scratch:
            checkout = copied(Path(scratch), fault)
            skips_own = before is not None or fault == UNHARMED
            runs = [] if skips_own else [(tests, 1) for tests in own_tests(fault)]
            if whole or fault == UNHARMED:
                runs.append(([], 2))
            found = (first_failure(checkout, tests, workers, limit) for tests, workers in runs)
            caught = next(filter(None, found), None)
    except (NotFound, RuntimeError) as reason:
        error = str(reason)
    seconds = round(time.monotonic() - start + (before["seconds"] if before else 0), 1)
    row = {"name": fault.name, "file": fault.file, "says": fault.says}
    return {**row, "caught": caught, "seconds": seconds, "whole": whole, "error": error}


def read(path: Path | None) -> dict[str, Row]:
    """The rows of an earlier start by name, without those that could not be tried."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = (json.loads(line) for line in lines)
    return {row["name"]: row for row in rows if row["error"] is None}


def table(rows: Iterable[Row]) -> str:
    lines = ["| fault | what is wrong | caught by | s |", "|---|---|---|---:|"]
    for row in rows:
        by = row["caught"] or ("NOT TRIED" if row["error"] else "MISSED")
        cells = (row["name"], row["says"], by, f"{row['seconds']:.0f}")
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def listed(faults: Iterable[Fault]) -> int:
    code = 0
    for fault in faults:
        try:
            harmed(fault)
            print(f"{fault.name:45} {fault.file:45} {fault.says}")
        except NotFound as error:
            code = 1
            print(error, file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; without any, all")
    parser.add_argument("--list", action="store_true", help="check the faults and print them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at the same time")
    parser.add_argument("--whole", action="store_true", help="the whole suite where the part's tests pass")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for a run of pytest")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, which are continued")
    given = parser.parse_args()
    known = {fault.name: fault for fault in (*FAULTS, UNHARMED)}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"there is no fault {', '.join(unknown)}")
    chosen = [known[name] for name in given.names] or FAULTS
    if given.list:
        return listed(fault for fault in chosen if fault != UNHARMED)
    done = read(given.output)
    todo = [
        fault
        for fault in chosen
        if fault.name not in done
        or (given.whole and not done[fault.name]["whole"] and done[fault.name]["caught"] is None)
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = [pool.submit(tried, one, given.whole, given.limit, done.get(one.name)) for one in todo]
        for row in (future.result() for future in as_completed(rows)):
            done[row["name"]] = row
            print(f"{row['name']}: {row['error'] or row['caught'] or 'MISSED'}", file=sys.stderr, flush=True)
            if given.output is not None:
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    found = [done[fault.name] for fault in chosen]
    print(table(found))
    return int(any(row["error"] for row in found))


UNHARMED = Fault("unharmed", "", "", "", "nothing is changed")
FAULTS = [
    Fault(
        "skip_replaces_the_first_tap",
        "hyena_jax/ops/long_conv.py",
        "h = h.at[..., 0].add(jnp.asarray(skip, h.dtype))",
        "h = h.at[..., 0].set(jnp.asarray(skip, h.dtype))",
        "the skip replaces the filter's first tap instead of adding",
    ),
    Fault(
        "fft_angle_of_the_length",
        "hyena_jax/ops/long_conv.py",
        "angle = np.arange(length) * (np.pi / (2 * n))",
        "angle = np.arange(length) * (np.pi / (2 * length))",
        "FFT convolutions wrap where the length is padded",
    ),
    Fault(
        "future_taps_not_turned_back",
        "hyena_jax/ops/long_conv.py",
        "future[:, None, :taps], method=method)[..., ::-1]",
        "future[:, None, :taps], method=method)",
        "the backward direction's output stays reversed in time",
    ),
    Fault(
        "attention_window_one_key_short",
        "hyena_jax/ops/attention.py",
        "parts.append((distance <= window)[None])",
        "parts.append((distance < window)[None])",
        "windowed attention leaves out its oldest key",
    ),
    Fault(
        "attention_sees_earlier_documents",
        "hyena_jax/ops/attention.py",
        "queries.segment_ids[:, :, None] == keys.segment_ids[:, None]",
        "queries.segment_ids[:, :, None] >= keys.segment_ids[:, None]",
        "attention also reads documents of smaller numbers",
    ),
    Fault(
        "rotary_exponent_halved",
        "hyena_jax/ops/attention.py",
        "frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)",
        "frequencies = base ** (-jnp.arange(half, dtype=dtype) / n_turned)",
        "rotary frequencies fall half as fast as they should",
    ),
    Fault(
        "rotary_turns_the_other_way",
        "hyena_jax/ops/attention.py",
        "[x1 * cos - x2 * sin, x2 * cos + x1 * sin]",
        "[x1 * cos + x2 * sin, x2 * cos - x1 * sin]",
        "rotary pairs turn in the opposite direction",
    ),
    Fault(
        "blocked_attention_starts_late",
        "hyena_jax/ops/fast/blocked_attention.py",
        "visible.offset + first * block_len - visible.window, 0)",
        "visible.offset + first * block_len - visible.window + 1, 0)",
        "a block's first query loses its oldest key",
    ),
    Fault(
        "documents_only_where_ids_grow",
        "hyena_jax/ops/documents.py",
        "segment_ids[:, 1:] != segment_ids[:, :-1]",
        "segment_ids[:, 1:] > segment_ids[:, :-1]",
        "a document with a smaller id is not a new one",
    ),
    Fault(
        "delta_rule_crosses_documents",
        "hyena_jax/ops/delta_rule.py",
        "before = jnp.where(document == 0, before, -jnp.inf)",
        "before = jnp.where(document >= 0, before, -jnp.inf)",
        "the memory before a chunk leaks into later documents",
    ),
    Fault(
        "delta_rule_derivative_with_diagonal",
        "hyena_jax/ops/delta_rule.py",
        "written = [(k, solve_unit_triangular(jnp.tril(decay.products(read, k), -1), known))]",
        "written = [(k, solve_unit_triangular(jnp.tril(decay.products(read, k)), known))]",
        "the delta rule's derivative flows through an ignored diagonal",
    ),
    Fault(
        "few_taps_step_not_reversed",
        "hyena_jax/ops/few_taps.py",
        "* h[:, ::-1]).sum(-1)",
        "* h).sum(-1)",
        "decoding applies the few taps in reversed order",
    ),
    Fault(
        "modal_prefill_decays_too_little",
        "hyena_jax/ops/modal_conv.py",
        "return powers[..., -1] * state + added, y",
        "return powers[..., -2] * state + added, y",
        "a modal state decays one step too few per block",
    ),
    Fault(
        "tile_reads_the_block_before",
        "hyena_jax/ops/online_conv.py",
        "bounds.begin - (position - size)",
        "bounds.begin - position",
        "a tile reads inputs of the Hyena block before",
    ),
    Fault(
        "gradient_of_last_state_lost",
        "hyena_jax/ops/linear_recurrence.py",
        "form(_delay(a, 1, not reverse), h_bar, last_bar, not reverse)",
        "form(_delay(a, 0, not reverse), h_bar, last_bar, not reverse)",
        "the gradient of a recurrence's last state is dropped",
    ),
    Fault(
        "associative_start_not_decayed",
        "hyena_jax/ops/linear_recurrence.py",
        "inputs.at[:, first].add(a[:, first] * h0)",
        "inputs.at[:, first].add(h0)",
        "the initial state enters without its first decay factor",
    ),
    Fault(
        "rg_lru_scale_not_squared",
        "hyena_jax/ops/rg_lru.py",
        "a, rest = jnp.exp(log_a), -jnp.expm1(2 * log_a)",
        "a, rest = jnp.exp(log_a), -jnp.expm1(log_a)",
        "RG-LRU scales inputs by sqrt(1 - a), not 1 - a^2",
    ),
    Fault(
        "aft_window_one_key_late",
        "hyena_jax/ops/fast/aft_blocks.py",
        "is_visible = (positions >= window)[..., None, None]",
        "is_visible = (positions > window)[..., None, None]",
        "AFT drops the first key that leaves its window",
    ),
    Fault(
        "fastmax_gradient_of_wrong_degree",
        "hyena_jax/ops/fastmax.py",
        "jnp.tril(kernel(x, p - 1)) * _products(o_bar, v)",
        "jnp.tril(kernel(x, p)) * _products(o_bar, v)",
        "Fastmax's derivative takes the kernel of degree p",
        ("tests/mixers/test_contract.py",),
    ),
    Fault(
        "hankel_bound_halved",
        "hyena_jax/ops/hankel.py",
        "return 2 * spectrum.tail(order)",
        "return spectrum.tail(order)",
        "the balanced truncation's error bound lacks its factor two",
    ),
    Fault(
        "scan_counted_as_one_round",
        "hyena_jax/ops/counts.py",
        '_times(_of_jaxpr(params["jaxpr"].jaxpr), params["length"])',
        '_times(_of_jaxpr(params["jaxpr"].jaxpr), 1)',
        "FLOPs of a scan are counted for one round",
    ),
    Fault(
        "real_fft_counted_as_complex",
        "hyena_jax/ops/counts.py",
        "5.0 if _is_complex(argument) and _is_complex(result) else 2.5",
        "5.0 if _is_complex(argument) or _is_complex(result) else 2.5",
        "a real FFT counts as many FLOPs as a complex one",
    ),
    Fault(
        "depth_scale_without_the_two",
        "hyena_jax/ops/initializers.py",
        "normal(0.02 / (2 * n_layers) ** 0.5)",
        "normal(0.02 / n_layers**0.5)",
        "GPT-2's output layers start sqrt(2) too large",
        ("tests/models/test_language_model.py",),
    ),
    Fault(
        "kernel_conv_reads_past_the_batch",
        "hyena_jax/ops/kernels/long_conv.py",
        "jnp.minimum(rows, batch - pl.program_id(2) * rows)",
        "jnp.minimum(rows, batch)",
        "the convolution kernel reads rows beyond a ragged batch",
    ),
    Fault(
        "kernel_recurrence_one_row_too_many",
        "hyena_jax/ops/kernels/recurrence.py",
        "carry = jnp.where(t < length, following, carry)",
        "carry = jnp.where(t <= length, following, carry)",
        "the TPU recurrence reads one row beyond the sequence",
    ),
    Fault(
        "kernel_delta_rule_averages_heads",
        "hyena_jax/ops/kernels/delta_rule.py",
        "return gradient.sum(axis=2).swapaxes(1, 2)",
        "return gradient.mean(axis=2).swapaxes(1, 2)",
        "gradients of shared heads are averaged instead of summed",
    ),
    Fault(
        "sharded_window_sees_before_the_start",
        "hyena_jax/ops/shards.py",
        "positions[None] >= 0, ids, method",
        "positions[None] >= -1, ids, method",
        "the first device's windows see a key before the sequence",
    ),
    Fault(
        "filter_positions_over_length_less_one",
        "hyena_jax/filters/implicit.py",
        "* 2 * np.pi * t / max_len",
        "* 2 * np.pi * t / max(max_len - 1, 1)",
        "positional angles divide by max_len - 1 instead of max_len",
    ),
    Fault(
        "window_shift_added_outside",
        "hyena_jax/filters/implicit.py",
        "h = h * (window + self.config.window_shift)",
        "h = h * window + self.config.window_shift",
        "the window's shift is added to the filter itself",
    ),
    Fault(
        "s4d_input_of_wrong_sign",
        "hyena_jax/filters/state_space.py",
        "_as_complex(dt[..., None] * self.b) / (1 - half_step)",
        "_as_complex(dt[..., None] * self.b) / (1 + half_step)",
        "S4D's bilinear input matrix has the wrong denominator",
    ),
    Fault(
        "real_modes_decoded_one_lag_late",
        "hyena_jax/filters/state_space.py",
        "Modes(log_modes, self.residue * jnp.exp(log_modes), self.residue.sum(-1))",
        "Modes(log_modes, self.residue, self.residue.sum(-1))",
        "real modes decode as if one lag had not passed",
    ),
    Fault(
        "windowed_filter_normed_over_filters",
        "hyena_jax/filters/explicit.py",
        '{"none": None, "channels": 1, "length": 2}',
        '{"none": None, "channels": 0, "length": 2}',
        "norm over channels sums over the filters instead",
    ),
    Fault(
        "short_window_follows_the_length",
        "hyena_jax/filters/explicit.py",
        "relative_time(h.shape[-1], self.max_len, h.dtype)",
        "relative_time(h.shape[-1], length, h.dtype)",
        "few taps' window depends on the sequence's length",
    ),
    Fault(
        "stu_alternating_sign_flipped",
        "hyena_jax/filters/spectral.py",
        "sign = 1 - 2 * (np.arange(length) % 2)",
        "sign = 2 * (np.arange(length) % 2) - 1",
        "STU's alternating branch enters with the opposite sign",
    ),
    Fault(
        "gated_delta_query_not_scaled",
        "hyena_jax/mixers/gated_delta.py",
        "q = sizes.key_dim**-0.5 * unit_length(q.reshape(batch, length, sizes.keys, -1))",
        "q = unit_length(q.reshape(batch, length, sizes.keys, -1))",
        "gated DeltaNet's queries lack 1 / sqrt(key_dim)",
    ),
    Fault(
        "kda_scale_inside_softplus",
        "hyena_jax/mixers/gated_delta.py",
        "log_a = -scale * jax.nn.softplus(rate)",
        "log_a = -jax.nn.softplus(scale * rate)",
        "KDA's decay scale stands inside the softplus",
    ),
    Fault(
        "hawk_ignores_reset_at_start",
        "hyena_jax/mixers/hawk.py",
        "of_rows=self.config.reset_at_start",
        "of_rows=False",
        "Hawk ignores the option reset_at_start",
    ),
    Fault(
        "hyena_gates_in_other_order",
        "hyena_jax/mixers/hyena.py",
        "gates[self.n_filters - o]",
        "gates[o]",
        "Hyena multiplies by its gates in the wrong order",
    ),
    Fault(
        "gated_hyena_gate_reversed",
        "hyena_jax/mixers/hyena.py",
        "long * gate + short[..., ahead:] * (1 - gate)",
        "long * (1 - gate) + short[..., ahead:] * gate",
        "the gate weighs the long and short path the other way",
    ),
    Fault(
        "mamba2_norm_before_the_gate",
        "hyena_jax/mixers/mamba.py",
        "y = self.norm(o * nn.silu(z.astype(dtype)))",
        "y = self.norm(o) * nn.silu(z.astype(dtype))",
        "Mamba-2 gates after its norm instead of before",
    ),
    Fault(
        "mamba3_padding_is_written",
        "hyena_jax/mixers/mamba.py",
        "v, starts = seq.masked(v), seq.starts(of_rows=False)",
        "v, starts = v, seq.starts(of_rows=False)",
        "padding of shorter prompts enters Mamba-3's memory",
    ),
    Fault(
        "rwkv7_reads_the_decayed_memory",
        "hyena_jax/mixers/rwkv7.py",
        "kappa * jnp.exp(-log_w), a * kappa",
        "kappa, a * kappa",
        "RWKV-7 reads its memory after the decay",
    ),
    Fault(
        "attention_key_norm_of_the_query",
        "hyena_jax/mixers/attention.py",
        "((self.q_norm, q), (self.k_norm, k))",
        "((self.q_norm, q), (self.q_norm, k))",
        "keys are normed with the queries' scale",
    ),
    Fault(
        "rwkv7_first_values_the_wrong_way",
        "hyena_jax/mixers/rwkv7.py",
        "v = v + (v_first - v) * jax",
        "v = v_first + (v - v_first) * jax",
        "the mix with the first layer's values is turned round",
        ("tests/models/test_language_model.py",),
    ),
    Fault(
        "fastmax_shard_counts_itself_twice",
        "hyena_jax/ops/shards.py",
        "dtype=jnp.int32) < jax.lax.axis_index(axis_name)",
        "dtype=jnp.int32) <= jax.lax.axis_index(axis_name)",
        "a shard's keys count as earlier ones too",
    ),
    Fault(
        "shard_memory_not_decayed",
        "hyena_jax/ops/shards.py",
        "lambda memory, part: part[0] @ memory + part[1]",
        "lambda memory, part: memory + part[1]",
        "a memory passes a shard without its decays",
    ),
    Fault(
        "gradient_stops_at_a_shard",
        "hyena_jax/ops/shards.py",
        "later = joined(edge, a[",
        "later = joined(jnp.zeros_like(edge), a[",
        "the recurrence's gradient does not reach the shard before",
    ),
    Fault(
        "weights_averaged_over_devices",
        "hyena_jax/training/step.py",
        "jax.lax.psum(total, axis_name)",
        "jax.lax.pmean(total, axis_name)",
        "devices divide by their mean number of targets",
    ),
    Fault(
        "checkpoint_minutes_are_seconds",
        "hyena_jax/training/hooks.py",
        "since >= 60 * minutes",
        "since >= minutes",
        "checkpoints by the clock come every few seconds",
    ),
    Fault(
        "target_must_be_passed",
        "hyena_jax/training/evaluate.py",
        "values[name] <= target if name in LOWER_IS_BETTER else values[name] >= target",
        "values[name] < target if name in LOWER_IS_BETTER else values[name] > target",
        "a target that is reached exactly does not end a run",
    ),
    Fault(
        "embed_ignores_the_layer",
        "hyena_jax/scoring/score.py",
        "inputs, None, True, self.layer",
        "inputs, None, True, None",
        "embed takes the last layer, whichever is asked for",
    ),
    Fault(
        "decay_steps_ignored",
        "hyena_jax/training/optimizer.py",
        "max(config.decay_steps or total_steps,",
        "max(total_steps,",
        "the rate always decays until the last step",
    ),
    Fault(
        "reached_target_forgotten",
        "hyena_jax/training/hooks.py",
        "reached=now.reached,",
        "reached=None,",
        "a run that reached its target is trained on by its own command",
    ),
    Fault(
        "losses_of_other_rows_compared",
        "hyena_jax/training/evaluate.py",
        'f"{data.fingerprint}:{data.n_eval_rows(max_rows)}"',
        'f"{data.fingerprint}"',
        "losses on different numbers of rows count as comparable",
    ),
    Fault(
        "distilled_bound_is_relative",
        "hyena_jax/distillation/outcome.py",
        'tried.values["loss"] - self.before["loss"]',
        'tried.values["loss"] / self.before["loss"] - 1',
        "the bound on the loss is taken as a fraction",
    ),
    Fault(
        "timed_checkpoints_push_out_others",
        "hyena_jax/training/checkpoint.py",
        'for step in sorted(found) if not steps.meta(step).get("timed")]',
        "for step in sorted(found)]",
        "checkpoints by the clock count among those to keep",
    ),
    Fault(
        "image_positions_left_out",
        "hyena_jax/models/image_classifier.py",
        "x = x + self.positions.astype(x.dtype)",
        "x = x + 0 * self.positions.astype(x.dtype)",
        "learned positions of patches are not added",
    ),
    Fault(
        "last_vector_is_the_first",
        "hyena_jax/scoring/score.py",
        '"last": lambda states: states[-1:]',
        '"last": lambda states: states[:1]',
        "embed's last vector is the first token's",
    ),
    Fault(
        "positions_not_interpolated",
        "hyena_jax/ops/attention.py",
        "angles = (positions.astype(dtype)[:, None] / scaling * frequencies)",
        "angles = (positions.astype(dtype)[:, None] * frequencies)",
        "rotary positions are not divided by their scaling",
    ),
    Fault(
        "evo_scaling_left_out",
        "hyena_jax/interop/stripedhyena2.py",
        'settings.number("rotary_emb_scaling_factor", 1.0)',
        'settings.number("rotary_scaling_factor", 1.0)',
        "StripedHyena 2's scaling of positions is not read",
    ),
    Fault(
        "gemma_export_of_the_same_window",
        "hyena_jax/interop/recurrentgemma.py",
        'values["attention_window_size"] + 1}, metadata',
        'values["attention_window_size"]}, metadata',
        "an export tells transformers a window of one less",
    ),
    Fault(
        "unknown_positions_are_numbers",
        "hyena_jax/models/language_model.py",
        "jnp.where(is_known[..., None], x, jnp.nan)",
        "jnp.where(is_known[..., None], x, x)",
        "a step beyond max_len gives plausible logits",
    ),
    Fault(
        "sweep_starts_anew",
        "hyena_jax/sweeps/serve.py",
        'StartOptions(init_from=request.init_from and opened(request.init_from, "init_from"))',
        "StartOptions(init_from=None)",
        "a sweep's runs do not start from the given parameters",
    ),
    Fault(
        "generate_swaps_top_p_and_min_p",
        "hyena_jax/cli/generate.py",
        "SamplingRule(self.greedy, self.temperature, self.top_k, self.top_p, self.min_p)",
        "SamplingRule(self.greedy, self.temperature, self.top_k, self.min_p, self.top_p)",
        "generate takes --top-p for --min-p",
        ("tests/test_cli.py", "tests/test_api.py"),
    ),
    Fault(
        "api_swaps_top_p_and_min_p",
        "hyena_jax/api.py",
        "SamplingRule(greedy, temperature, top_k, top_p, min_p)",
        "SamplingRule(greedy, temperature, top_k, min_p, top_p)",
        "Run.generate takes top_p for min_p",
    ),
    Fault(
        "state_full_is_a_number",
        "hyena_jax/mixers/inputs.py",
        "jnp.where(end <= room, y, jnp.nan)",
        "jnp.where(end <= room, y, y)",
        "a cache that is full gives plausible outputs",
    ),
    Fault(
        "layer_norm_eps_ignored",
        "hyena_jax/mixers/layers.py",
        "nn.LayerNorm(epsilon=eps, dtype=dtype)",
        "nn.LayerNorm(epsilon=1e-5, dtype=dtype)",
        "LayerNorm ignores the config's norm_eps",
        ("tests/models",),
    ),
    Fault(
        "delta_padding_is_written",
        "hyena_jax/mixers/sequence.py",
        "values = v if real is None else jnp.where(real[..., None, None], v, 0)",
        "values = v",
        "padding of shorter prompts is written into the memory",
    ),
    Fault(
        "recurrence_not_reset_at_documents",
        "hyena_jax/mixers/sequence.py",
        "factors = a if starts is None else jnp.where(starts[..., None], 0, a)",
        "factors = a",
        "recurrent state is not reset at document boundaries",
    ),
    Fault(
        "fir_padding_not_masked",
        "hyena_jax/mixers/sequence.py",
        "inputs, before = self.masked(part, axis), jnp.moveaxis(history, 0, batch)",
        "inputs, before = part, jnp.moveaxis(history, 0, batch)",
        "short filters read the padding of shorter prompts",
    ),
    Fault(
        "ring_forgets_the_first_token",
        "hyena_jax/mixers/sequence.py",
        "real = position - age >= self.first[:, None]",
        "real = position - age > self.first[:, None]",
        "local attention's decoding never sees the first token",
    ),
    Fault(
        "consistency_check_too_lenient",
        "hyena_jax/mixers/consistency.py",
        "TOLERANCE = 1e-4",
        "TOLERANCE = 1e-1",
        "the check of plugins' mixers tolerates a tenth",
    ),
    Fault(
        "layers_share_dropout_masks",
        "hyena_jax/models/blocks.py",
        "rngs = {name: block.make_rng(name) for name in scope.rngs}",
        "rngs = {name: scope.root.rngs[name].as_jax_rng() for name in scope.rngs}",
        "all layers drop the same units",
    ),
    Fault(
        "first_ffn_ignored",
        "hyena_jax/models/blocks.py",
        "Block(mixer, config if i else first,",
        "Block(mixer, config,",
        "the first layer takes ffn instead of first_ffn",
    ),
    Fault(
        "remat_recomputes_the_filters",
        "hyena_jax/models/blocks.py",
        '"filters": jax.checkpoint_policies.save_only_these_names(FILTER)',
        '"filters": jax.checkpoint_policies.nothing_saveable',
        "remat=filters recomputes the long filters too",
    ),
    Fault(
        "positions_not_restarted",
        "hyena_jax/models/language_model.py",
        "positions = documents(segment_ids).position",
        "positions = jnp.arange(length)",
        "positions are not restarted in packed documents",
    ),
    Fault(
        "soft_cap_not_divided",
        "hyena_jax/models/language_model.py",
        "cap * jnp.tanh(logits / cap)",
        "cap * jnp.tanh(logits)",
        "the soft cap saturates logits at 1 instead of c",
    ),
    Fault(
        "padded_vocabulary_not_cut",
        "hyena_jax/models/language_model.py",
        "logits = logits[..., : self.config.vocab_size]",
        "logits = logits[..., :]",
        "logits of padding rows of the vocabulary remain",
    ),
    Fault(
        "tied_head_scaled",
        "hyena_jax/models/language_model.py",
        "self.embedding.attend(x) if",
        "self.embedding.attend(x * self.config.d_model**-0.5) if",
        "a tied head divides by sqrt(d_model)",
    ),
    Fault(
        "prefill_positions_count_padding",
        "hyena_jax/models/language_model.py",
        "jnp.maximum(position + jnp.arange(n_tokens) - first[:, None], 0)",
        "jnp.broadcast_to(position + jnp.arange(n_tokens), tokens.shape)",
        "shorter prompts' learned positions count the padding",
    ),
    Fault(
        "autoencoder_other_periods",
        "hyena_jax/models/autoencoder.py",
        "-(np.arange(half) / (half - 1))",
        "-(np.arange(half) / half)",
        "the decoder's sines miss their longest period",
    ),
    Fault(
        "weights_averaged_in_each_part",
        "hyena_jax/training/step.py",
        'weighted(x, batch["weights"]).sum() / total for',
        'weighted(x, batch["weights"]).sum() / jnp.maximum(batch["weights"].sum(), 1) for',
        "accumulation takes a mean of each part's own mean",
    ),
    Fault(
        "evaluation_counts_padding",
        "hyena_jax/training/step.py",
        "{name: weighted(x, weights) for name, x in values.items()}",
        "values",
        "held-out losses include padding and unscored targets",
    ),
    Fault(
        "devices_share_the_dropout_key",
        "hyena_jax/training/step.py",
        "key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))",
        "key = jax.random.fold_in(key, 0)",
        "all devices drop the same units",
        ("tests/check/test_check.py",),
    ),
    Fault(
        "parts_share_the_dropout_key",
        "hyena_jax/training/step.py",
        "keys = jax.random.split(key, accumulation_steps)",
        "keys = jnp.stack([key] * accumulation_steps)",
        "accumulated parts drop the same units",
    ),
    Fault(
        "steps_share_the_dropout_key",
        "hyena_jax/training/step.py",
        "jax.random.fold_in(jax.random.key(seed, impl=random_bits), state.step)",
        "jax.random.key(seed, impl=random_bits)",
        "every step drops the same units",
    ),
    Fault(
        "bad_step_forgotten",
        "hyena_jax/training/step.py",
        "jnp.where((state.bad_step == FINITE) & is_bad, step, state.bad_step)",
        "jnp.where(is_bad, step, FINITE)",
        "a step that was not finite is forgotten",
    ),
    Fault(
        "gradients_summed_over_devices",
        "hyena_jax/training/step.py",
        "reduce = jax.lax.pmean if total is None else jax.lax.psum",
        "reduce = jax.lax.psum",
        "gradients are summed over devices instead of averaged",
        ("tests/training/test_distributed.py",),
    ),
    Fault(
        "cosine_ends_after_the_last_step",
        "hyena_jax/training/optimizer.py",
        "optax.cosine_decay_schedule(peak, end - config.warmup_steps, final)",
        "optax.cosine_decay_schedule(peak, end, final)",
        "the cosine decays warmup_steps too long",
    ),
    Fault(
        "clipped_after_adam",
        "hyena_jax/training/optimizer.py",
        "optax.clip_by_global_norm(config.clip_norm or math.inf),\n        direction,",
        "direction,\n        optax.clip_by_global_norm(config.clip_norm or math.inf),",
        "the optimizer's updates are clipped instead of the gradients",
    ),
    Fault(
        "frozen_gradients_are_clipped_with",
        "hyena_jax/training/optimizer.py",
        "optax.partition(trained | constant, labels)",
        "optax.partition(trained, labels)",
        "gradients of constant parameters count in the norm",
    ),
    Fault(
        "logged_rate_of_the_next_step",
        "hyena_jax/training/hooks.py",
        "float(run.schedule(now.step - 1))",
        "float(run.schedule(now.step))",
        "the logged learning rate is the next step's",
    ),
    Fault(
        "summary_speed_a_thousandfold",
        "hyena_jax/training/hooks.py",
        "{rate / 1e9:,.1f} model GFLOP/s",
        "{rate / 1e6:,.1f} model GFLOP/s",
        "the summary prints MFLOP/s as GFLOP/s",
    ),
    Fault(
        "label_smoothing_only_adds",
        "hyena_jax/training/loss.py",
        "return (1 - config.label_smoothing) * nats + config.label_smoothing * spread",
        "return nats + config.label_smoothing * spread",
        "label smoothing does not take from the target",
    ),
    Fault(
        "top_k_counts_one_more",
        "hyena_jax/training/loss.py",
        "return n_before < config.k",
        "return n_before <= config.k",
        "top-k accuracy accepts the k + 1 best",
    ),
    Fault(
        "digest_of_the_name",
        "hyena_jax/training/checkpoint_files.py",
        'return hashlib.file_digest(file, "sha256").hexdigest()',
        "return hashlib.sha256(path.name.encode()).hexdigest()",
        "a checkpoint's digests are of file names, not contents",
    ),
    Fault(
        "checkpoint_digests_not_compared",
        "hyena_jax/training/checkpoint_files.py",
        "if _digest(checkpoint / name) != digest:",
        "if not digest:",
        "a damaged checkpoint is not noticed",
    ),
    Fault(
        "best_checkpoint_is_the_worst",
        "hyena_jax/training/checkpoint.py",
        "return min(comparable, key=",
        "return max(comparable, key=",
        "the checkpoint of the largest loss counts as best",
    ),
    Fault(
        "oldest_checkpoints_kept",
        "hyena_jax/training/checkpoint.py",
        "*lasting[-keep:]",
        "*lasting[:keep]",
        "the oldest checkpoints are kept instead of the latest",
    ),
    Fault(
        "metrics_rows_repeat_after_resume",
        "hyena_jax/training/metrics.py",
        'for row in read_rows(path) if row["step"] <= step]',
        "for row in read_rows(path)]",
        "rows of lost steps stay, and appear twice",
    ),
    Fault(
        "bits_reached_from_below",
        "hyena_jax/training/evaluate.py",
        '("loss", "perplexity", "bits_per_byte")',
        '("loss", "perplexity")',
        "a target of bits_per_byte is reached at once",
    ),
    Fault(
        "changed_data_accepted_unasked",
        "hyena_jax/training/folder.py",
        "run.fingerprint != data.fingerprint and not options.accept_changed_data",
        "run.fingerprint != data.fingerprint and options.accept_changed_data",
        "a run continues on other data without a word",
    ),
    Fault(
        "lora_not_scaled",
        "hyena_jax/training/lora.py",
        "return leaf + config.scale * update",
        "return leaf + update",
        "LoRA's update lacks alpha / r",
    ),
    Fault(
        "layers_start_with_equal_weights",
        "hyena_jax/training/drawing.py",
        "[recipe.hashes for recipe in alike]",
        "[alike[0].hashes for _ in alike]",
        "all layers of a kind draw equal initial weights",
    ),
    Fault(
        "runs_together_share_a_seed",
        "hyena_jax/training/together.py",
        "seeds = [member.setup.experiment.seed for member in members]",
        "seeds = [members[0].setup.experiment.seed for member in members]",
        "runs trained together drop by the first one's seed",
        ("tests/sweeps",),
    ),
    Fault(
        "flops_of_two_passes",
        "hyena_jax/training/timing.py",
        "PASSES_OF_TRAINING = 3",
        "PASSES_OF_TRAINING = 2",
        "MFU counts the backward pass as one product",
    ),
    Fault(
        "epochs_in_one_order",
        "hyena_jax/data/dataset.py",
        ".shuffle().repeat()",
        ".shuffle().repeat(reseed_each_epoch=False)",
        "every epoch has the same order of rows",
    ),
    Fault(
        "rest_of_an_epoch_skipped",
        "hyena_jax/data/dataset.py",
        ".repeat().batch(batch_size)",
        ".batch(batch_size, drop_remainder=True).repeat()",
        "rows that fill no batch are skipped each epoch",
    ),
    Fault(
        "resume_repeats_a_batch",
        "hyena_jax/data/dataset.py",
        "batches[start:]",
        "batches[max(start - 1, 0) :]",
        "a resumed run trains on a batch again",
    ),
    Fault(
        "eval_windows_miss_the_end",
        "hyena_jax/data/dataset.py",
        "np.linspace(0, n_rows - 1, most)",
        "np.linspace(0, n_rows, most, endpoint=False)",
        "evenly spaced held-out rows stop before the last",
    ),
    Fault(
        "perplexity_bits_inverted",
        "hyena_jax/data/dataset.py",
        "* n_tokens / n_bytes / math.log(2)",
        "* n_bytes / n_tokens / math.log(2)",
        "bits per byte multiply by bytes per token",
    ),
    Fault(
        "shard_boundary_one_shard_early",
        "hyena_jax/data/shards.py",
        'np.searchsorted(self._ends, windows, "right")',
        'np.searchsorted(self._ends, windows, "left")',
        "a shard's first window is read from the one before",
    ),
    Fault(
        "end_token_joins_the_next_document",
        "hyena_jax/data/shards.py",
        'batch["segment_ids"] = np.pad(ended[:, :-1], ((0, 0), (1, 0)))',
        'batch["segment_ids"] = ended',
        "a document's last token belongs to the next document",
    ),
    Fault(
        "held_out_shard_scores_padding",
        "hyena_jax/data/shards.py",
        "np.arange(1, self.seq_len + 1) <",
        "np.arange(self.seq_len) <",
        "a target beyond a held-out shard's end is scored",
    ),
    Fault(
        "shards_in_one_order",
        "hyena_jax/data/order.py",
        "(seed, i, int(current))",
        "(seed, i, 0)",
        "shards' windows have one order in all epochs",
    ),
    Fault(
        "validation_text_is_trained_on",
        "hyena_jax/data/text.py",
        "Text(text[:cut], text[cut:],",
        "Text(text, text[cut:],",
        "the held-out tenth of a text is trained on",
    ),
    Fault(
        "text_targets_not_shifted",
        "hyena_jax/data/text.py",
        'return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}',
        'return {"inputs": windows[:, :-1], "targets": windows[:, :-1]}',
        "the target of a token is the token itself",
    ),
    Fault(
        "last_window_not_evaluated",
        "hyena_jax/data/text.py",
        "-(-(len(self.held_out) - 1) // self.seq_len)",
        "(len(self.held_out) - 1) // self.seq_len",
        "the last, shorter held-out window is left out",
    ),
    Fault(
        "bytes_of_latin_1",
        "hyena_jax/data/tokenizers.py",
        "np.frombuffer(text.encode(), np.uint8)",
        'np.frombuffer(text.encode("latin-1", "replace"), np.uint8)',
        "bytes are of Latin-1 instead of UTF-8",
    ),
    Fault(
        "normalised_by_held_out_images",
        "hyena_jax/data/images.py",
        "fit_normalization(train.images)",
        "fit_normalization(held_out.images)",
        "mean and deviation come from the held-out images",
    ),
    Fault(
        "digit_labels_not_permuted",
        "hyena_jax/data/images.py",
        "Labelled(images[rows], labels[rows]) for rows in (order[:cut], order[cut:])",
        "Labelled(images[rows], labels[: len(rows)]) for rows in (order[:cut], order[cut:])",
        "digits are permuted and their labels are not",
    ),
    Fault(
        "task_trains_on_test_rows",
        "hyena_jax/data/tasks.py",
        "_is_held_out(row) == is_test",
        "_is_held_out(row) >= is_test",
        "rows kept for the evaluation are trained on",
        ("tests/tasks",),
    ),
    Fault(
        "whole_rows_include_padding",
        "hyena_jax/data/tasks.py",
        "(correct | (weights == 0)).all(-1)",
        "correct.all(-1)",
        "sequence accuracy also asks for padding to be right",
        ("tests/tasks",),
    ),
    Fault(
        "characters_counted_as_bytes",
        "hyena_jax/data/prepare.py",
        "self._n_bytes += len(document.text.encode())",
        "self._n_bytes += len(document.text)",
        "shards count characters of a text as bytes",
    ),
    Fault(
        "top_p_one_token_too_few",
        "hyena_jax/generation/sampling.py",
        "jnp.cumsum(probabilities, axis=-1) - probabilities",
        "jnp.cumsum(probabilities, axis=-1)",
        "top-p leaves out the token that reaches p",
    ),
    Fault(
        "temperature_applied_twice",
        "hyena_jax/generation/sampling.py",
        "/ max(rule.temperature, 1e-30)",
        "/ max(rule.temperature, 1e-30) ** 2",
        "the temperature divides the logits twice",
    ),
    Fault(
        "only_the_first_stop_token_ends",
        "hyena_jax/generation/programs.py",
        "token[:, None] == rows.stop_tokens)",
        "token[:, None] == rows.stop_tokens[:1])",
        "all but the first stop token are ignored",
    ),
    Fault(
        "sampling_key_reused",
        "hyena_jax/generation/programs.py",
        "cursor.index + 1, stopped",
        "cursor.index, stopped",
        "all tokens of a sample are drawn with one key",
    ),
    Fault(
        "seeds_repeated_for_prompts",
        "hyena_jax/generation/decoding.py",
        "np.tile(np.arange(request.n_samples, dtype=np.uint32) + np.uint32(request.seed), n_prompts)",
        "np.repeat(np.arange(request.n_samples, dtype=np.uint32) + np.uint32(request.seed), n_prompts)",
        "with several prompts samples take each other's seeds",
    ),
    Fault(
        "slide_keeps_the_older_half",
        "hyena_jax/generation/decoding.py",
        "row[-max(1, model.config.max_len // 2) :]",
        "row[: max(1, model.config.max_len // 2)]",
        "a full context slides to its older half",
    ),
    Fault(
        "long_prompt_keeps_its_start",
        "hyena_jax/generation/prompts.py",
        "ids[-config.max_len :]",
        "ids[: config.max_len]",
        "of a too long prompt the beginning is continued",
    ),
    Fault(
        "stop_text_keeps_one_more",
        "hyena_jax/generation/prompts.py",
        "is_new[i, kept:] = False",
        "is_new[i, kept + 1 :] = False",
        "a token after the stop text is kept",
    ),
    Fault(
        "saved_state_of_other_weights",
        "hyena_jax/generation/saved_state.py",
        "digest.update(np.ascontiguousarray(leaf).tobytes())",
        'digest.update(f"{leaf.dtype} {leaf.shape}".encode())',
        "a saved state is accepted by another checkpoint",
    ),
    Fault(
        "bits_of_the_wrong_base",
        "hyena_jax/scoring/score.py",
        "bits = -self.log_likelihood / math.log(2)",
        "bits = -self.log_likelihood / math.log2(math.e)",
        "nats become bits by the wrong factor",
    ),
    Fault(
        "windows_scored_from_their_start",
        "hyena_jax/scoring/score.py",
        "row[window.length - window.scored : window.length]",
        "row[: window.scored]",
        "later windows give the values of their context",
    ),
    Fault(
        "padding_symbols_take_probability",
        "hyena_jax/scoring/score.py",
        "cross_entropy(logits[..., : self.n_symbols], targets)",
        "cross_entropy(logits, targets)",
        "ids that no token has take probability",
    ),
    Fault(
        "context_is_scored",
        "hyena_jax/scoring/harness.py",
        "slice(max(0, len(ids) - 1 - n_scored), len(ids) - 1)",
        "slice(0, len(ids) - 1)",
        "the harness's log-likelihood includes the context",
        ("tests/interop/test_harness.py",),
    ),
    Fault(
        "file_total_of_scored_tokens",
        "hyena_jax/scoring/score_file.py",
        "nats / math.log(2) * n_tokens / sum",
        "nats / math.log(2) * n_scored / sum",
        "a file's bits per byte leave first tokens out",
    ),
    Fault(
        "lfm2_gates_swapped",
        "hyena_jax/interop/lfm2.py",
        "order = [1, 0, 2]",
        "order = [0, 1, 2]",
        "LFM2's two gates are read in each other's place",
    ),
    Fault(
        "olmo_eps_not_read",
        "hyena_jax/interop/olmo_hybrid.py",
        'eps = settings.number("rms_norm_eps", 1e-6)',
        "eps = 1e-6",
        "Olmo Hybrid's rms_norm_eps is not read",
    ),
    Fault(
        "evo_filter_reversed",
        "hyena_jax/interop/stripedhyena2.py",
        "is_reversed = mixer.filter.n_taps < CONVOLVED_FROM",
        "is_reversed = mixer.filter.n_taps >= CONVOLVED_FROM",
        "StripedHyena 2's short filters are read backwards",
    ),
    Fault(
        "evo_heads_not_regrouped",
        "hyena_jax/interop/stripedhyena2.py",
        "x.reshape(first, second, channels, d_model).swapaxes(0, 1)",
        "x.reshape(second, first, channels, d_model)",
        "queries, keys and values of heads are mixed up",
    ),
    Fault(
        "gemma_window_of_the_other_code",
        "hyena_jax/interop/recurrentgemma.py",
        "replace(mixer, window=stated - 1)",
        "replace(mixer, window=stated)",
        "an export's window comes back one longer",
    ),
    Fault(
        "safari_skips_in_other_order",
        "hyena_jax/interop/safari.py",
        "lambda x: x.reshape(d_model, n_filters).T,",
        "lambda x: x.reshape(n_filters, d_model),",
        "skips of orders above 2 are permuted",
    ),
    Fault(
        "rwkv_head_norm_eps_unscaled",
        "hyena_jax/interop/rwkv7.py",
        "norm_eps=head_dim * eps",
        "norm_eps=eps",
        "the head norm's eps is not times the head's size",
    ),
    Fault(
        "card_in_the_wrong_unit",
        "hyena_jax/cli/export.py",
        '"nats an image" if data.input_kind.is_images else "nats a token"',
        '"nats an image" if data.input_kind.is_tokens else "nats a token"',
        "the model card swaps nats a token and an image",
        ("tests/training/test_export.py", "tests/interop"),
    ),
    Fault(
        "mqar_values_not_ordered",
        "hyena_jax/tasks/recall.py",
        "row(inputs, values[order], 2 * n + 2 * gaps[order])",
        "row(inputs, values, 2 * n + 2 * gaps[order])",
        "MQAR asks for a value of another key",
    ),
    Fault(
        "memorisation_answers_one_early",
        "hyena_jax/tasks/copying.py",
        "n + noise + np.arange(n))",
        "n + noise - 1 + np.arange(n))",
        "answers are asked for one position too early",
    ),
    Fault(
        "cut_examples_are_scored",
        "hyena_jax/tasks/strings.py",
        "is_answer * float(is_whole)",
        "is_answer",
        "examples that a packed row cuts are scored",
    ),
    Fault(
        "permutations_in_other_order",
        "hyena_jax/tasks/states.py",
        "products[state, x]",
        "products[x, state]",
        "permutation words multiply from the other side",
    ),
    Fault(
        "compression_chance_too_low",
        "hyena_jax/tasks/mad.py",
        "((config.seq_len - 1) / (config.vocab_size - 1) + 1) / config.seq_len",
        "1 / (config.vocab_size - 1)",
        "the chance of compression forgets the constant last id",
    ),
    Fault(
        "perplexity_better_when_larger",
        "hyena_jax/sweeps/runs.py",
        "a < b if metric in LOWER_IS_BETTER else a > b",
        'a < b if metric == "loss" else a > b',
        "comparisons call the largest perplexity the best",
    ),
    Fault(
        "killed_run_counts_as_done",
        "hyena_jax/sweeps/sweep.py",
        "STOPPED: WAITING}",
        "STOPPED: DONE}",
        "a run that was stopped counts as done",
    ),
    Fault(
        "more_steps_are_not_trained",
        "hyena_jax/sweeps/sweep.py",
        'ended |= {"status": WAITING, "planned": None}',
        'ended |= {"planned": None}',
        "a done run does not continue to more steps",
    ),
    Fault(
        "state_size_counts_constants",
        "hyena_jax/sweeps/compare.py",
        "return size(2) - size(1)",
        "return size(1)",
        "a sequence's state includes what all rows share",
    ),
    Fault(
        "mean_over_seeds_is_the_median",
        "hyena_jax/sweeps/compare.py",
        "return statistics.fmean(self.last)",
        "return statistics.median(self.last)",
        "the mean over seeds is their median",
    ),
    Fault(
        "seed_not_passed_to_runs",
        "hyena_jax/sweeps/sweep.py",
        "Request(kind, _encoded(outcome.experiment),",
        "Request(kind, _encoded(replace(outcome.experiment, seed=0)),",
        "all runs of a sweep train with seed 0",
    ),
    Fault(
        "planned_products_without_two",
        "hyena_jax/plan/roofline.py",
        "return 2.0 * rows * terms * columns * times",
        "return 1.0 * rows * terms * columns * times",
        "a multiply and add counts as one FLOP",
    ),
    Fault(
        "planned_gib_are_gb",
        "hyena_jax/plan/presentation.py",
        "from hyena_jax.system.chips import GIB, MIB",
        "from hyena_jax.system.chips import GIGA as GIB, MIB",
        "the plan prints GB as GiB",
    ),
    Fault(
        "planned_optimizer_state_forgotten",
        "hyena_jax/plan/step.py",
        '"optimizer": _bytes(state.opt_state, strategy)',
        '"optimizer": _bytes(shapes, strategy)',
        "the plan's optimizer has one moment instead of two",
    ),
    Fault(
        "all_reduce_counted_once",
        "hyena_jax/plan/collectives.py",
        "return 2 * (1 - 1 / n) * self.bytes",
        "return (1 - 1 / n) * self.bytes",
        "an all-reduce counts as only an all-gather",
    ),
    Fault(
        "nested_loops_not_multiplied",
        "hyena_jax/plan/hlo.py",
        "yield from self.running(called, rounds * more)",
        "yield from self.running(called, more)",
        "instructions in nested loops count for the inner one",
    ),
    Fault(
        "continued_depth_off_by_one",
        "hyena_jax/plan/planning.py",
        "(repeats - 1) * per_repeat[name]",
        "repeats * per_repeat[name]",
        "a plan from two depths has a repeat too many",
    ),
    Fault(
        "chip_memory_in_gigabytes",
        "hyena_jax/system/chips.py",
        "usable=(memory - 0.25) * GIB",
        "usable=(memory - 0.25) * GIGA",
        "chips have GB of memory instead of GiB",
        ("tests/plan",),
    ),
    Fault(
        "median_is_the_fastest_run",
        "hyena_jax/benchmark/timing.py",
        "return Timing(median, lower, upper,",
        "return Timing(min(seconds), lower, upper,",
        "the median of the times is the fastest run",
    ),
    Fault(
        "benchmark_does_not_wait",
        "hyena_jax/benchmark/timing.py",
        "jax.block_until_ready(result)",
        "jax.block_until_ready(None)",
        "times end before the device has finished",
    ),
    Fault(
        "copy_rate_counts_one_way",
        "hyena_jax/benchmark/timing.py",
        '2 * n_bytes / times["copy"].median',
        'n_bytes / times["copy"].median',
        "a copy's bandwidth counts reads without writes",
    ),
    Fault(
        "tokens_of_one_sequence",
        "hyena_jax/benchmark/decode.py",
        "f\"{row['batch'] / step['seconds']['median']:,.0f}\"",
        "f\"{1 / step['seconds']['median']:,.0f}\"",
        "tokens per second are of one sequence of the batch",
    ),
    Fault(
        "milliseconds_a_thousandfold",
        "hyena_jax/benchmark/results.py",
        "value = 1e3 * seconds",
        "value = 1e6 * seconds",
        "the tables of benchmarks print microseconds as ms",
    ),
    Fault(
        "verdicts_of_single_rows",
        "hyena_jax/benchmark/comparison.py",
        "1 - ERROR_RATE / n_rows / 2",
        "1 - ERROR_RATE / 2",
        "intervals hold for one row, not for all",
    ),
    Fault(
        "filter_error_of_the_largest_channel",
        "hyena_jax/distillation/model.py",
        "error=float(np.linalg.norm(error[i]) / total[i])",
        "error=float(error[i].max() / total[i])",
        "a filter's error takes its largest channel, not L2",
    ),
    Fault(
        "divergence_the_other_way",
        "hyena_jax/distillation/model.py",
        "kl_divergence(log_p, log_q)).sum(-1)",
        "kl_divergence(log_q, log_p)).sum(-1)",
        "KL(distilled || run) instead of KL(run || distilled)",
    ),
    Fault(
        "mixing_matrices_transposed",
        "hyena_jax/inspect/json_values.py",
        '[View(f"{unit} {i}", matrices[i]) for i in chosen]',
        '[View(f"{unit} {i}", matrices[i].T) for i in chosen]',
        "the page's matrices of heads are transposed",
    ),
    Fault(
        "effective_length_one_short",
        "hyena_jax/inspect/mixers.py",
        "reached.argmax(axis=-1) + 1, 0)",
        "reached.argmax(axis=-1), 0)",
        "a filter's effective length is one lag short",
    ),
    Fault(
        "probed_norms_too_small",
        "hyena_jax/inspect/mixers.py",
        "y.dtype) / n_probes**0.5",
        "y.dtype) / n_probes",
        "estimated Jacobian norms shrink with the number of probes",
    ),
    Fault(
        "processes_evaluate_the_first_rows",
        "hyena_jax/parallel/strategy.py",
        "np.split(x, self.count)[i] for i in self.parts",
        "np.split(x, self.count)[i] for i in range(len(self.parts))",
        "all processes evaluate the first process's rows",
    ),
    Fault(
        "fsdp_leaves_large_arrays_whole",
        "hyena_jax/parallel/sharded.py",
        "math.prod(shape) < SMALL",
        "math.prod(shape) > SMALL",
        "FSDP shards the small arrays alone",
    ),
    Fault(
        "replica_check_reads_one_copy",
        "hyena_jax/parallel/processes.py",
        "np.ascontiguousarray(shard.data)",
        "np.ascontiguousarray(leaf.addressable_shards[0].data)",
        "the check of replicas compares one copy with itself",
    ),
    Fault(
        "atomic_write_without_fsync",
        "hyena_jax/system/files.py",
        "os.fsync(file.fileno())",
        "file.fileno()",
        "a file replaces another before it is on the disk",
    ),
    Fault(
        "lock_is_shared",
        "hyena_jax/system/files.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "two processes may hold a run's folder",
    ),
    Fault(
        "dots_in_bucket_names",
        "hyena_jax/system/storage/location.py",
        "(?!\\.\\.?(?:/|$))[A-Za-z0-9",
        "[A-Za-z0-9",
        "a URL may climb out of its folder by ..",
    ),
    Fault(
        "lease_renewed_too_late",
        "hyena_jax/system/storage/lease.py",
        "self._seconds / 4, self._done",
        "self._seconds * 4, self._done",
        "a lease is renewed after it has ended",
    ),
    Fault(
        "half_rows_go_to_the_bucket",
        "hyena_jax/system/storage/mirror.py",
        'return data.rfind(b"\\n") + 1',
        "return len(data)",
        "a half written row of metrics is put",
    ),
    Fault(
        "resident_memory_in_kilobytes",
        "hyena_jax/system/files.py",
        "return 1024 * int(found[1]) if found else 0",
        "return 1000 * int(found[1]) if found else 0",
        "resident memory takes KiB as thousands of bytes",
        ("tests/benchmark",),
    ),
    Fault(
        "unknown_keys_accepted",
        "hyena_jax/config/files.py",
        "forbid_extra_keys=True",
        "forbid_extra_keys=False",
        "a misspelt key of a config is ignored",
    ),
    Fault(
        "config_digest_not_compared",
        "hyena_jax/config/files.py",
        "if values[DIGEST] != _digest(rest):",
        "if not values[DIGEST]:",
        "a damaged config.json is not noticed",
        ("tests/training/test_folder.py",),
    ),
    Fault(
        "resumed_run_never_differs",
        "hyena_jax/config/files.py",
        "_leaves(ours, runtime=False), _leaves(theirs, runtime=False)",
        "_leaves(ours, runtime=False), _leaves(ours, runtime=False)",
        "another experiment continues a run's folder",
        ("tests/training/test_folder.py",),
    ),
    Fault(
        "changed_optimizer_dated_early",
        "hyena_jax/config/files.py",
        "kept.append(Stage(step + 1, now))",
        "kept.append(Stage(step, now))",
        "a changed optimizer is dated one step early",
        ("tests/training/test_changed_optimizer.py",),
    ),
    Fault(
        "negative_switch_sets",
        "hyena_jax/config/flags.py",
        "value = name == flag.name",
        "value = name in by_name",
        "--no-FLAG sets the flag",
    ),
    Fault(
        "whole_numbers_are_rounded",
        "hyena_jax/config/flags.py",
        "value = hint(text)",
        "value = hint(float(text)) if hint is int else hint(text)",
        "a flag for an int takes 2.7 as 2",
    ),
    Fault(
        "open_range_includes_its_end",
        "hyena_jax/config/checks.py",
        'number > self.least if self.ends[0] == "("',
        'number >= self.least if self.ends[0] == "("',
        "a range above 0 accepts 0",
    ),
    Fault(
        "adamw_default_changed",
        "hyena_jax/config/optimizers.py",
        '= 0.99\n    """Decay of the second moment."""',
        '= 0.999\n    """Decay of the second moment."""',
        "AdamW's default b2 is another one",
    ),
    Fault(
        "weight_decay_on_biases",
        "hyena_jax/config/optimizers.py",
        'r"/(bias|scale|skip|short_taps|short_bias)$"',
        'r"/(scale|skip|short_taps|short_bias)$"',
        "biases are decayed along with the weights",
        ("tests/training/test_optimizer.py",),
    ),
    Fault(
        "failed_sweep_exits_with_zero",
        "hyena_jax/cli/sweep.py",
        "runs failed or diverged: {', '.join(bad)}\", 1)",
        "runs failed or diverged: {', '.join(bad)}\", 0)",
        "a sweep with failed runs ends with exit code 0",
        ("tests/sweeps",),
    ),
    Fault(
        "comparison_a_thousandfold",
        "hyena_jax/cli/bench.py",
        'f"{1e3 * seconds:.4g}"',
        'f"{1e6 * seconds:.4g}"',
        "bench compare prints microseconds as ms",
        ("tests/benchmark",),
    ),
    Fault(
        "generate_ignores_its_seed",
        "hyena_jax/cli/generate.py",
        "rule, stop, self.seed, self.num_samples",
        "rule, stop, 0, self.num_samples",
        "generate draws with seed 0 whatever --seed says",
        ("tests/generation",),
    ),
    Fault(
        "embed_index_counts_records",
        "hyena_jax/cli/embed.py",
        "first += len(rows)",
        "first += 1",
        "the index of embeddings counts records instead of rows",
        ("tests/scoring",),
    ),
    Fault(
        "page_size_a_thousandfold",
        "hyena_jax/cli/show.py",
        "len(text.encode()) / 1e6",
        "len(text.encode()) / 1e3",
        "show prints kB of its page as MB",
        ("tests/inspect",),
    ),
    Fault(
        "load_run_ignores_the_step",
        "hyena_jax/api.py",
        "load_params(folder, model, str(step), note)",
        'load_params(folder, model, "latest", note)',
        "load_run ignores the step that is asked for",
    ),
    Fault(
        "attention_logits_rounded_to_bfloat16",
        "hyena_jax/ops/fast/blocked_attention.py",
        'jnp.einsum("brtd,bsd->brts", q, k, preferred_element_type=dtype) / q',
        'jnp.einsum("brtd,bsd->brts", q, k).astype(dtype) / q',
        "blocked attention's logits are bfloat16 where the softmax should be in float32",
    ),
    Fault(
        "shard_with_later_start_passes_memory_on",
        "hyena_jax/ops/delta_rule.py",
        "jnp.where(starts.any(axis=1)[:, None, None], 0, decay)",
        "jnp.where(starts[:, 0][:, None, None], 0, decay)",
        "without erasing, memory crosses a shard in whose middle a document begins",
    ),
    Fault(
        "mixing_values_of_grouped_heads_tiled",
        "hyena_jax/mixers/mixing.py",
        "jnp.repeat(v, o.shape[2] // v.shape[2], axis=2)",
        "jnp.tile(v, (1, 1, o.shape[2] // v.shape[2], 1))",
        "with grouped heads, mixing pairs matrices with other heads' values",
        tests=("tests/inspect/test_mixing.py",),
    ),
    Fault(
        "rwkv7_shift_mix_ends_at_the_last_layer",
        "hyena_jax/mixers/rwkv7.py",
        "* (1 - self.layer / self.n_layers)",
        "* (1 - self.layer / max(self.n_layers - 1, 1))",
        "RWKV-7's initial shift mix falls to 0 in the last layer",
    ),
    Fault(
        "padding_advances_a_scan",
        "hyena_jax/mixers/sequence.py",
        "return (after if is_real is None else _where(is_real, after, carry)), y",
        "return after, y",
        "padding of shorter prompts changes the carry of seq.scan",
    ),
    Fault(
        "windowed_norm_over_the_current_length",
        "hyena_jax/filters/explicit.py",
        'taps = self.max_len if self.config.norm_axis == "length" else length',
        "taps = length",
        "a norm over the lags depends on the sequence's length",
    ),
    Fault(
        "features_of_inner_layers_are_normed",
        "hyena_jax/models/language_model.py",
        "return self.final_norm(x) if layer is None else x",
        "return self.final_norm(x)",
        "the residual stream after a layer passes the final norm too",
    ),
    Fault(
        "embedding_scale_rounded_by_dtype",
        "hyena_jax/models/language_model.py",
        "if self.config.round_embedding_scale else scale",
        'if self.config.dtype == "bfloat16" else scale',
        "round_embedding_scale is ignored, the dtype of activations decides",
    ),
    Fault(
        "infinite_gradient_not_noticed",
        "hyena_jax/training/step.py",
        'is_bad = ~(jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm))',
        'is_bad = ~jnp.isfinite(means["loss"])',
        "a step whose gradient alone is not finite does not count as bad",
    ),
    Fault(
        "pause_restarts_the_clock",
        "hyena_jax/training/timing.py",
        "self._start += took",
        "self._start = time.perf_counter()",
        "after an evaluation or a save, the speed leaves out the time before it",
    ),
    Fault(
        "log_probs_after_temperature",
        "hyena_jax/generation/programs.py",
        "log_probs = jax.nn.log_softmax(logits)",
        "log_probs = jax.nn.log_softmax(logits / sampling.rule.temperature)",
        "log-probabilities are those after the temperature, not the model's",
    ),
    Fault(
        "griffin_gate_and_value_swapped",
        "hyena_jax/interop/recurrentgemma.py",
        'enumerate(("gate_proj", "in_proj"))',
        'enumerate(("in_proj", "gate_proj"))',
        "DeepMind's Flax checkpoints are read with the MLP's gate and value exchanged",
    ),
    Fault(
        "worst_channel_by_absolute_error",
        "hyena_jax/distillation/model.py",
        "worst = (error / scale).argmax(1)",
        "worst = error.argmax(1)",
        "the worst channel has the largest absolute, not relative error",
    ),
    Fault(
        "sweep_forgets_earlier_starts_seconds",
        "hyena_jax/sweeps/sweep.py",
        "None, outcome.seconds + event.seconds",
        "None, event.seconds",
        "a continued run's seconds are of its last start alone",
    ),
    Fault(
        "run_config_not_put_last",
        "hyena_jax/system/storage/mirror.py",
        "return sorted(whole, key=lambda name: (name == RUN_CONFIG, name))",
        "return sorted(whole)",
        "config.json, which makes a folder a run's, is put into the bucket before data.json",
    ),
    Fault(
        "nan_overlooked_among_errors",
        "hyena_jax/check/facts.py",
        "return float(np.max([*errors]))",
        "return float(max(errors))",
        "check overlooks an error that is NaN behind one that is a number",
    ),
    Fault(
        "lost_stage_is_kept",
        "hyena_jax/config/files.py",
        "if stage.first_step <= step]",
        "if stage.first_step <= step + 1]",
        "a changed optimizer whose steps were all lost stays in the list of stages",
        tests=("tests/training/test_changed_optimizer.py",),
    ),
    Fault(
        "bos_again_behind_a_loaded_state",
        "hyena_jax/cli/generate.py",
        'encode(run.tokenizer, prompt, "prompt", at_start=is_new)',
        'encode(run.tokenizer, prompt, "prompt", at_start=True)',
        "a prompt that continues --load-state begins with the start token once more",
        tests=("tests/generation/test_prompts.py",),
    ),
    Fault(
        "rwkv7_shifts_of_rate_and_gate_swapped",
        "hyena_jax/interop/rwkv7.py",
        'SHIFTS = "rwkvag"',
        'SHIFTS = "rwkvga"',
        "token-shift vectors x_a and x_g of published RWKV-7 weights are read in each other's place",
    ),
    Fault(
        "dna_stop_texts_keep_their_case",
        "hyena_jax/generation/prompts.py",
        "texts = [text.upper() for text in texts]",
        "texts = [*texts]",
        "a stop text of lower-case bases is never found, since DNA decodes to upper case",
    ),
    Fault(
        "samples_state_of_other_prompts",
        "hyena_jax/generation/programs.py",
        "jnp.repeat(leaf, count, axis=0)",
        "jnp.concatenate([leaf] * count)",
        "with several prompts and samples, rows of the state are in another order than their prompts",
    ),
    Fault(
        "muon_scale_of_the_other_side",
        "hyena_jax/training/optimizer.py",
        "math.sqrt(max(1, n_out / n_in))",
        "math.sqrt(max(1, n_in / n_out))",
        "Muon scales wide inputs up instead of wide outputs",
    ),
    Fault(
        "tensorboard_drops_the_last_kept_step",
        "hyena_jax/training/trackers.py",
        "self._write(step=start.first_step, session_log",
        "self._write(step=start.first_step - 1, session_log",
        "after a resume TensorBoard also drops the rows of the step of the checkpoint",
    ),
    Fault(
        "export_claims_ends_of_any_vocabulary",
        "hyena_jax/interop/transformers_folder.py",
        "is_released = bos == family.BOS and model.vocab_size",
        "is_released = model.vocab_size",
        "an export names the released model's end and padding tokens though its texts begin otherwise",
    ),
    Fault(
        "unfinished_character_lost_at_the_end",
        "hyena_jax/data/tokenizers.py",
        "return decode(ids, final=True)",
        "return decode(ids)",
        "a continuation that ends within a character loses what was held back",
    ),
    Fault(
        "classes_of_training_labels_alone",
        "hyena_jax/data/images.py",
        "n_classes = 1 + int(max(self.train.labels.max(), self.held_out.labels.max()))",
        "n_classes = 1 + int(self.train.labels.max())",
        "a held-out label larger than all training labels has no class",
    ),
    Fault(
        "induction_marker_before_the_last_one",
        "hyena_jax/tasks/recall.py",
        "place = rng.integers(length - 2)",
        "place = rng.integers(length)",
        "the first marker may stand right before the last, so that the answer is the marker",
    ),
    Fault(
        "rows_held_out_are_trained_on",
        "hyena_jax/data/rows.py",
        "rows, indices = rows.rows, rows.start + indices",
        "rows, indices = rows.rows, indices",
        "a held-out tenth reads the first rows, which are trained on",
    ),
    Fault(
        "chance_of_training_lengths",
        "hyena_jax/data/tasks.py",
        "return self.task.chance(self.config.for_evaluation())",
        "return self.task.chance(self.config)",
        "chance level (and scaled accuracy) is that of training rows, not of the rows that are evaluated",
    ),
    Fault(
        "seconds_of_a_stopped_worker_lost",
        "hyena_jax/sweeps/pool.py",
        "event._replace(seconds=event.seconds + spent.get(event.work, 0.0))",
        "event._replace(seconds=event.seconds)",
        "a run that another worker continued reports the seconds of the last alone",
    ),
    Fault(
        "lost_lock_freed_unconditionally",
        "hyena_jax/system/storage/lease.py",
        'self._bucket.put(LOCK_OBJECT, b"", self._generation, SHORT_PATIENCE)',
        'self._bucket.put(LOCK_OBJECT, b"", None, SHORT_PATIENCE)',
        "a paused owner that does not know that it lost the lock frees another process's",
    ),
    Fault(
        "ignored_signals_are_handled",
        "hyena_jax/system/signals.py",
        "if handler != signal.SIG_IGN}",
        "if handler is not None}",
        "SIGHUP under nohup, SIGINT in a background job stop a run that should ignore them",
    ),
    Fault(
        "roofline_share_of_the_smaller_limit",
        "hyena_jax/benchmark/timing.py",
        "least = max(work.flops / roofline",
        "least = min(work.flops / roofline",
        "the least time of a pass is the smaller of computation and traffic",
    ),
]

if __name__ == "__main__":
    sys.exit(main())
