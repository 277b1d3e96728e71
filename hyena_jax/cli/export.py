"""`hyena-jax export`: the parameters of a run, as a safetensors file or as a folder for transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hyena_jax import config
from hyena_jax.cli.base import OfRun, note, say
from hyena_jax.config import Experiment, ImagesConfig, ShardsConfig, TaskConfig, TextConfig, TokensConfig
from hyena_jax.config.models import NORM_EPS
from hyena_jax.system.errors import require
from hyena_jax.system.files import require_free
from hyena_jax.system.startup import start_jax

if TYPE_CHECKING:
    from hyena_jax.api import LoadedRun

LOSS = "validation/loss"


@dataclass(frozen=True, kw_only=True)
class Export(OfRun):
    """Write a run's parameters to a safetensors file, or to a folder that transformers loads."""

    output: Path
    """File to write, such as model.safetensors, or with --format transformers a new folder."""
    format: Literal["safetensors", "transformers"] = "safetensors"
    """`safetensors`: our names, to start runs from. `transformers`: theirs, of a RecurrentGemma, LFM2 or Olmo
    Hybrid."""
    license: str = "unknown"
    """Licence that the model card names, as Hugging Face abbreviates it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_line = self.license.isprintable() and "|" not in self.license and self.license != ""
        require(is_line, "license", self.license, "a name on one line")

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        from hyena_jax.api import load_run
        from hyena_jax.interop import transformers_folder
        from hyena_jax.system import files
        from hyena_jax.training import export
        from hyena_jax.training.lora import without_lora

        output = self.output
        if self.format == "transformers":
            require_free("output", output)
            run = load_run(self.workdir, self.step)
            model, encoding = without_lora(run.experiment).model, run.folder.encoding
            transformers_folder.write(output, model, run.params, encoding, _card(run, self.license))
            say(f"step {run.step} written to {output}, with a model card in README.md")
            return 0
        export.check_target(output)
        card_file = output.with_suffix(".md")
        require(
            not card_file.exists(), "output", str(output), f"a new file, but {card_file.name} already exists"
        )
        run = load_run(self.workdir, self.step)
        export.write(output, run.params, config.encode(without_lora(run.experiment)), run.step)
        files.write_text(card_file, _card(run, self.license), is_new=True)
        config_file = export.config_beside(output)
        say(f"step {run.step} written to {output}, its config to {config_file}, a model card to {card_file}")
        return 0


def _loss_unit(experiment: Experiment) -> str:
    """The unit of the loss, as far as the config tells: own data may count something else."""
    data = experiment.data
    if not experiment.loss.in_nats:
        return ""
    if isinstance(data, TaskConfig):
        return "nats an answer"
    if isinstance(data, TextConfig | TokensConfig | ShardsConfig | ImagesConfig):
        return "nats an image" if data.input_kind.is_images else "nats a token"
    return "nats"


def _card(run: "LoadedRun", license_name: str) -> str:
    """The model card as Markdown, with the header that Hugging Face reads."""
    from hyena_jax.system.machine import describe_machine, describe_versions
    from hyena_jax.system.trees import n_entries

    losses = [row[LOSS] for row in run.metrics() if row["step"] == run.step and LOSS in row]
    loss = "not measured"
    if losses and losses[-1] is not None:
        loss = f"{losses[-1]:.6g} {_loss_unit(run.experiment)}".rstrip()
    experiment, machine = config.encode(run.experiment), describe_machine()
    model = experiment["model"]
    norms = {model.get(place) for place in ("norm", "final_norm", "embedding_norm")}
    kinds = {kind: model.get("norm_eps") or eps for kind, eps in NORM_EPS.items() if kind in norms}
    rows = {
        "parameters": f"{n_entries(run.params):,}",
        "epsilon of its norms": ", ".join(f"{kind} {eps:g}" for kind, eps in kinds.items()) or "no norms",
        "step": f"{run.step:,}",
        "validation loss": loss,
        "data fingerprint (SHA-256)": f"`{run.folder.fingerprint}`",
        "exported on": f"{machine['devices']} x {machine['device']}, {machine['system']}",
        "versions": ", ".join(f"{package} {version}" for package, version in describe_versions().items()),
        "license": license_name,
    }
    head = ["---", f"license: {json.dumps(license_name)}", "tags:", "- hyena_jax", "---", ""]
    title = [f"# {run.workdir.resolve().name}", ""]
    table = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]
    about = ["The hardware of the training is not recorded. The experiment:", ""]
    code = ["```json", json.dumps(experiment, indent=2), "```", ""]
    return "\n".join([*head, *title, *table, *about, *code])
