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

from results import faults_in_a_line

from hyena_jax.cli.base import note, script_flags
from hyena_jax.config import Above
from hyena_jax.system.errors import require
from hyena_jax.system.files import read_json, write_text

FOLDER = Path(__file__).parent
TPU = FOLDER.parent / "tpu" / "results.json"
MIXERS = ("hyena", "hawk", "gated_delta", "kda", "mamba2", "attention")
PEAKS = {"v5 lite": 197e12, "v5p": 459e12, "v6 lite": 918e12, "v4": 275e12, "H100": 989e12, "H200": 989e12}
"""Products in bfloat16 a second, as published, by a part of the device's name."""
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
    file: str = "results.json"
    most: float = 0.5


def steps(small: bool) -> list[Step]:
    """In the order of what they tell: values, operators, models, decoding, and the longest rows last."""
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
    batches, context = (("1", "2"), "64") if small else (("1", "64"), "4096")
    decode = ("--contexts", context, "--batch", *batches, "--n-new", "32")
    found.append(Step("decoding", ("bench", "decode", *several, *decode)))
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
    for step in steps(flags.small):
        left = end - time.monotonic()
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


def _run(step: Step, folder: Path, seconds: float) -> dict[str, Any] | None:
    """What the command wrote, and how it ended; None if it wrote nothing or failed."""
    kept = folder / step.name.replace(" ", "_").replace(":", "_")
    command = [sys.executable, "-m", "hyena_jax", *step.arguments, "--output", str(kept)]
    limit = ("--minutes", f"{0.9 * seconds / 60:.2f}") if step.name == "check" else ()
    began = time.monotonic()
    try:
        code = subprocess.run([*command, *limit], timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        code = None
    written = kept / step.file
    if not written.exists() or code not in (None, 0, 1):  # 1: values that differ, which is a result
        return None
    found = read_json(step.name, written)
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
    wrong = [case["name"] for case in cases if case["wrong"]]
    checked = f"{len(cases) - len(wrong)} of {len(cases)} right" + (
        f"; wrong: {', '.join(wrong)}" if wrong else ""
    )
    lines = [where, "", f"**Values** (`hyena-jax check`): {checked if cases else MISSING}.", ""]
    several = [*done.get("operators", {}).get("rows", []), *done.get("long operators", {}).get("rows", [])]
    times = ("tokens", "forward, ms", "with gradients, ms")
    lines += _table(
        ("mixer, 768 channels, bfloat16", *times),
        [(row["method"], f"{row['length']:,}", *_ms(row, "forward", "forward_backward")) for row in several],
    )
    models = ("pile_hyena:153m", "griffin:griffin_1b", "mamba2_130m")
    lines += _table(
        ("model", "step, ms", "tokens/s", "MFU", "`plan`: MFU on a v5e, pmap"),
        [(name, *_model(done.get(f"model {name}", {})), _planned(name)) for name in models],
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
    (row,), device = found["rows"], found["machine"]["device"]
    seconds = row["passes"]["train_step"]["seconds"]["median"]
    rate = row["units"] / seconds
    peak = next((peak for kind, peak in PEAKS.items() if kind in device), None)
    chips = peak and peak * found["machine"]["devices"]
    share = "" if chips is None else f"{6 * row['n_params'] * rate / chips:.2f}"
    return f"{1e3 * seconds:.4g}", f"{rate:,.0f}", share


def _planned(name: str) -> str:
    """From the plans of `experiments/tpu`: optimistic to pessimistic."""
    for row in json.loads(TPU.read_text())["rows"]:
        if (row["config"], row["target"], row["layout"]) == (name, "v5e:4x4", "pmap"):
            mfu = row["result"].get("mfu")
            return "" if mfu is None else f"{mfu['roofline']:.2f} to {mfu['pessimistic']:.2f}"
    return "not planned"


def write_page(results: dict[str, Any]) -> None:
    """Between the marks of README.md."""
    page = FOLDER / "README.md"
    before, _, rest = page.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end -->")[2]
    write_text(page, f"{before}<!-- tables -->\n{tables(results)}<!-- end -->{after}")


if __name__ == "__main__":
    flags = script_flags(Flags)
    with faults_in_a_line():
        results = measure(flags)
        if flags.output == FOLDER and not flags.small:
            write_page(results)
        else:
            print(tables(results))
