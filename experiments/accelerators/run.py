"""What an accelerator computes, and how fast: everything of a first day there, in the order of what it tells.

python experiments/accelerators/run.py [--minutes 10] [--small] [--output FOLDER]

Each step is a command of `hyena-jax` in its own process, ended when its time has passed. Results are kept in
results.json as they come; the same command continues with the steps that are missing. Then the tables of
README.md are written, if the results lie beside it. `--small` takes sizes for a CPU, and prints them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import faults_in_a_line, fill

from hyena_jax.cli.base import note, script_flags
from hyena_jax.config import Above
from hyena_jax.system.chips import CHIPS, KINDS, peak_flops
from hyena_jax.system.errors import require
from hyena_jax.system.files import read_json, write_text

FOLDER = Path(__file__).parent
TPU = FOLDER.parent / "tpu" / "results.json"
MIXERS = ("hyena", "hawk", "gated_delta", "kda", "mamba2", "attention")
TARGETS = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "h100": "h100"}
"""The target of `plan` that is one chip, by its kind."""
MISSING = "not measured yet"
LEAST_SECONDS = 15
"""A step that has less time is left for the next time."""


@dataclass(frozen=True)
class Flags:
    """Measure everything on this accelerator, step by step."""

    minutes: Annotated[float, Above(0)] = 10.0
    """End after this time; the same command continues."""
    small: bool = False
    """Sizes that a CPU computes in minutes, to try the script."""
    output: Path = FOLDER
    """Folder of results.json, and of each step's own files."""


class Step(NamedTuple):
    """One command; `most` is the share of the time left that it may take."""

    name: str
    arguments: tuple[str, ...]
    file: str | None = "results.json"
    """What it writes; None: only how long it took is kept."""
    most: float = 0.5
    program: tuple[str, ...] = ("-m", "hyena_jax")
    folder: str = "--output"
    """The flag of its folder."""


def steps(small: bool, chip: str | None) -> list[Step]:
    """In the order of what they tell: values, operators, models, decoding, and the longest rows last.

    Args:
      chip: the kind of the device, for `plan`; None where it is not known, or not yet.
    """
    width = ("--d-model", "64") if small else ("--d-model", "768", "--dtype", "bfloat16")
    several = ("--mixers", *(MIXERS[:2] if small else MIXERS), *width, "--seconds", "0.3")
    short, long = (("256",), ("512",)) if small else (("2048", "8192"), ("32768", "131072"))
    forms = f"{FOLDER / 'recurrence.py'}:associative,{'scan' if small else 'kernel'}"
    found = [
        Step("check", ("check", *(("--only", "conv", "hawk") if small else ())), "check.json"),
        Step("operators", ("bench", "operators", *several, "--lengths", *short)),
        Step("recurrence", ("bench", "function", forms, "--sizes", *short, "--seconds", "0.3")),
    ]
    models = {"quickstart": 2} if small else {"pile_hyena:153m": 8, "griffin:griffin_1b": 2, "mamba2_130m": 8}
    for name, rows in models.items():
        size = ("--batch-size", str(rows), "--seconds", "0.5")
        found.append(Step(f"model {name}", ("bench", "model", name, *size)))
        if chip is not None:
            target = ("--target", TARGETS[chip], "--data.batch-size", str(rows))
            found.append(Step(f"plan {name}", ("plan", name, *target), "plan.json"))
    batches, context = (("1", "2"), "64") if small else (("1", "64"), "4096")
    decode = ("--contexts", context, "--batch", *batches, "--n-new", "32")
    found.append(Step("decoding", ("bench", "decode", *several, *decode)))
    torch = (str(FOLDER / "torch_attention.py"),)
    found.append(Step("PyTorch's attention", ("--lengths", *short, *long), program=torch))
    for name in ("start", "second start"):
        start = ("train", "quickstart", "--training.steps", "1")
        found.append(Step(name, start, None, folder="--workdir"))
    found.append(Step("long operators", ("bench", "operators", *several, "--lengths", *long), most=1.0))
    return found


def measure(flags: Flags) -> dict[str, Any]:
    """The results so far, and those of the steps that fit into the time."""
    path, end = flags.output / "results.json", time.monotonic() + 60 * flags.minutes
    results: dict[str, Any] = (
        read_json("results", path) if path.exists() else {"small": flags.small, "steps": {}}
    )
    require(results["small"] == flags.small, "small", flags.small, f"{results['small']}, as in {path}")
    flags.output.mkdir(parents=True, exist_ok=True)
    for name in [step.name for step in steps(flags.small, next(iter(TARGETS)))]:
        found = {step.name: step for step in steps(flags.small, _chip(results))}
        if name not in found:  # a plan for a device that `plan` does not know
            continue
        step, left = found[name], end - time.monotonic()
        if results["steps"].get(step.name, {}).get("is_whole"):
            continue
        if left < LEAST_SECONDS:
            note(f"{step.name}: left for the next time")
            continue
        note(f"{step.name}: {left / 60:.1f} minutes left")
        done = _run(step, flags.output, left * step.most)
        if done is not None:  # one that is not whole is made again the next time
            results["steps"][step.name] = done
        write_text(path, json.dumps(results, indent=1) + "\n")
    return results


def _chip(results: dict[str, Any]) -> str | None:
    """The kind of the device, as the first step found it."""
    about = (one.get("results", {}).get("machine", {}) for one in results["steps"].values())
    return next((KINDS[machine["device"]] for machine in about if machine.get("device") in KINDS), None)


def _run(step: Step, folder: Path, seconds: float) -> dict[str, Any] | None:
    """What the command wrote, and how it ended; None if it wrote nothing or failed."""
    kept = folder / step.name.replace(" ", "_").replace(":", "_").replace("'", "")
    command = [sys.executable, *step.program, *step.arguments, step.folder, str(kept)]
    limit = ("--minutes", f"{0.9 * seconds / 60:.2f}") if step.name == "check" else ()
    began = time.monotonic()
    try:
        code = subprocess.run([*command, *limit], timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        code = None
    written = None if step.file is None else kept / step.file
    if code not in (None, 0, 1) or (code is None if written is None else not written.exists()):
        return None  # code 1: values that differ, or a model that does not fit, which is a result
    found = {} if written is None else read_json(step.name, written)
    return {
        "command": ["hyena-jax", *step.arguments],
        "is_whole": code is not None and len(found.get("cases", [])) == found.get("of", 0),
        "seconds": round(time.monotonic() - began, 1),
        "results": found,
    }


def tables(results: dict[str, Any]) -> str:
    """The page's tables; what was not measured says so, beside what `plan` expects."""
    done = {name: one.get("results", {}) for name, one in results["steps"].items()}
    found = next((one for one in done.values() if "machine" in one), None)
    where = "No device yet." if found is None else _where(found)
    cases = done.get("check", {}).get("cases", [])
    took = [results["steps"].get(name, {}).get("seconds") for name in ("start", "second start")]
    wrong = [case["name"] for case in cases if case["wrong"]]
    checked = f"{len(cases) - len(wrong)} of {len(cases)} right" + (
        f"; wrong: {', '.join(wrong)}" if wrong else ""
    )
    lines = [where, "", f"**Values** (`hyena-jax check`): {checked if cases else MISSING}.", ""]
    started = MISSING if None in took else f"{took[0]:.0f} s, and {took[1]:.0f} s with its programs cached"
    lines += [f"**A run of one step** (`hyena-jax train quickstart`): {started}.", ""]
    parts = ("operators", "long operators", "PyTorch's attention")
    several = [row for part in parts for row in done.get(part, {}).get("rows", [])]
    times = ("tokens", "forward, ms", "with gradients, ms")
    lines += _table(
        ("mixer, 768 channels, bfloat16", *times),
        [(row["method"], f"{row['length']:,}", *_ms(row, "forward", "forward_backward")) for row in several],
    )
    models = ("pile_hyena:153m", "griffin:griffin_1b", "mamba2_130m")
    lines += _table(
        ("model", "step, ms", "tokens/s", "MFU", "`plan`: MFU on a v5e, pmap", "`plan` for this chip, ms"),
        [
            (name, *_model(found := done.get(f"model {name}", {})), _planned(name), _beside(found, plan))
            for name in models
            for plan in [done.get(f"plan {name}", {})]
        ],
    )
    rows = done.get("decoding", {}).get("rows", [])
    lines += _table(
        ("decoding, two layers", "context", "batch", "prefill, ms", "token, ms"),
        [
            (row["method"], f"{row['context']:,}", str(row["batch"]), *_ms(row, "prefill", "step"))
            for row in rows
        ],
    )
    rows = done.get("recurrence", {}).get("rows", [])
    lines += _table(
        ("form of the recurrence", *times),
        [(row["method"], f"{row['size']:,}", *_ms(row, "forward", "forward_backward")) for row in rows],
    )
    return "\n".join(lines)


def _where(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    return f"{machine['devices']} x {machine['device']}, JAX {versions['jax']}, Python {versions['python']}."


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    shown = rows or [(MISSING, *[""] * (len(heads) - 1))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *shown)] + [""]


def _ms(row: dict[str, Any], *parts: str) -> list[str]:
    return [f"{1e3 * row['passes'][part]['seconds']['median']:.3g}" for part in parts]


def _model(found: dict[str, Any]) -> tuple[str, str, str]:
    """Time of a step, tokens a second, and the share of the chips' products, 6 a parameter and token."""
    if not found.get("rows"):
        return MISSING, "", ""
    (row,), machine = found["rows"], found["machine"]
    seconds = row["passes"]["train_step"]["seconds"]["median"]
    rate, peak = row["units"] / seconds, peak_flops(machine["device"])
    share = "" if peak is None else f"{6 * row['n_params'] * rate / (peak * machine['devices']):.2f}"
    return f"{1e3 * seconds:.4g}", f"{rate:,.0f}", share


def _planned(name: str) -> str:
    """From the plans of `experiments/tpu`: optimistic to pessimistic."""
    for row in json.loads(TPU.read_text())["rows"]:
        if (row["config"], row["target"], row["layout"]) == (name, "v5e:4x4", "pmap"):
            found = row["result"]
            if not found["fits"]:
                return "does not fit"
            mfu = found.get("mfu")
            return "" if mfu is None else f"{mfu['roofline']:.2f} to {mfu['pessimistic']:.2f}"
    return "not planned"


def _beside(found: dict[str, Any], plan: dict[str, Any]) -> str:
    """The estimate for one chip, and where the step differs by more than 25%, the part that differs most.

    Parts: what products and memory take more at the rates that `bench` measured beside the step than at the
    published ones, and all that is left, such as exchanges.
    """
    if not found.get("rows") or not plan.get("plans"):
        return ""
    (planned,), chip = plan["plans"], CHIPS[KINDS[found["machine"]["device"]]]
    low, high = (1e3 * planned["seconds"][bound] for bound in ("roofline", "pessimistic"))
    step = 1e3 * found["rows"][0]["passes"]["train_step"]["seconds"]["median"]
    text = f"{low:.4g} to {high:.4g}"
    if 0.75 * low <= step <= 1.25 * high:
        return text
    rates = found["roofline"]
    slower = {
        "products": chip.flops / rates["flops_per_second"],
        "memory": chip.memory_rate / rates["bytes_per_second"],
    }
    more = {
        part: 1e3 * (factor - 1) * sum(kind[part] for kind in planned["kinds"])
        for part, factor in slower.items()
    }
    more["exchanges and all else"] = step - high - sum(more.values())
    part = max(more, key=lambda name: abs(more[name]))
    return f"{text}; differs most by {part} ({more[part]:+.3g} ms)"


if __name__ == "__main__":
    flags = script_flags(Flags)
    with faults_in_a_line():
        results = measure(flags)
        if flags.output == FOLDER and not flags.small:
            fill(FOLDER / "README.md", "tables", tables(results))
        else:
            print(tables(results))
