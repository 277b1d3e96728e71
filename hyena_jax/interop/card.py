"""The model card of an export: what the model is, what it was trained on, what it scored."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """What a card says."""

    config: Mapping[str, Any]
    step: int
    n_parameters: int
    fingerprint: str
    """SHA-256 of the data and the tokenizer."""
    loss: float | None
    """Validation loss; None if it was not measured."""
    loss_unit: str
    """Such as `nats a token`; empty if nobody knows."""
    machine: Mapping[str, Any]
    """Of the process that exported; where the run was trained is not recorded."""
    versions: Mapping[str, str]
    license: str
    """As Hugging Face names it, such as `apache-2.0`; `unknown` if nobody said."""


def card(name: str, facts: Facts) -> str:
    """The card as Markdown, with the header that Hugging Face reads."""
    loss = "not measured" if facts.loss is None else f"{facts.loss:.6g} {facts.loss_unit}".rstrip()
    machine, versions = facts.machine, facts.versions
    rows = {
        "parameters": f"{facts.n_parameters:,}",
        "step": f"{facts.step:,}",
        "validation loss": loss,
        "data fingerprint (SHA-256)": f"`{facts.fingerprint}`",
        "exported on": f"{machine['devices']} x {machine['device']}, {machine['system']}",
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()),
        "license": facts.license,
    }
    return "\n".join(
        [
            "---",
            f"license: {json.dumps(facts.license)}",
            "tags:",
            "- hyena_jax",
            "---",
            "",
            f"# {name}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows.items()),
            "",
            "The hardware of the training is not recorded. The experiment:",
            "",
            "```json",
            json.dumps(facts.config, indent=2),
            "```",
            "",
        ]
    )
