"""`hyena-jax train`: trains, then shows a sample of the text or predictions on images."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyena_jax.cli.base import OfConfig, fail, note, unread
from hyena_jax.cli.flags import FLAT, positional, take_flag
from hyena_jax.config import Cluster, Experiment, PluginFlags, UserError, plugin_flags
from hyena_jax.errors import printable
from hyena_jax.startup import import_jax, keep_compiled_programs, keep_freed_memory, start_devices


@dataclass(frozen=True)
class Train(OfConfig):
    """Train CONFIG[:VARIANT] in a folder, or continue the run in that folder.

    `hyena-jax train --resume DIR [flags]` continues the run in DIR with its own settings, without CONFIG and
    --workdir; flags, such as --training.steps, change a setting.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path
    """Folder of the run; created if missing, continued if it holds this experiment."""
    profile: Path | None = None
    """Write a jax.profiler trace of ten steps to this folder."""
    init_from: Path | None = None
    """Initial parameters of a new run: a file written by `export`, or the folder of a run, whose newest
    checkpoint and tokenizer it then takes."""
    accept_changed_data: bool = False
    """Continue the run although its data changed; the new data are read with the run's tokenizer."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    cluster: Cluster = field(default=Cluster(), metadata=FLAT)
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Writes `--resume DIR` as CONFIG and --workdir first."""
        rest = list(arguments)
        folder = take_flag("--resume", rest)
        if folder is not None:
            others = [argument for argument in rest if argument.partition("=")[0] == "--workdir"]
            others += [argument for argument in rest[:1] if not argument.startswith("-")]
            if others:
                already = f"--resume {folder!r} already gives config and workdir"
                raise UserError(f"{already}: leave out {others[0]!r}")
            rest = [str(Path(folder) / "config.json"), "--workdir", folder, *rest]
        return super().take(called, rest)

    def run(self, arguments: Sequence[str]) -> int:
        """Trains, then shows a sample of the text or predictions on images."""
        import_jax()
        keep_compiled_programs(note)
        keep_freed_memory()

        from hyena_jax.generation.sample import write_sample
        from hyena_jax.output import Output
        from hyena_jax.parallel import processes
        from hyena_jax.signals import Interrupted
        from hyena_jax.training.loop import Diverged
        from hyena_jax.training.predictions import draw_predictions, has_labels
        from hyena_jax.training.run import train

        experiment, workdir = self.experiment, self.workdir
        processes.join(self.cluster, experiment.parallel.heartbeat_timeout)
        start_devices()
        console = Output()
        try:
            with processes.leaving_on_failure(fail):
                result = train(
                    experiment,
                    workdir,
                    console,
                    self.profile,
                    self.init_from,
                    self.accept_changed_data,
                )
                is_first = processes.is_first()
                processes.leave()
        except Diverged as error:
            return fail(error, 4) if processes.is_first() else 4
        except Interrupted as error:
            if processes.is_first():
                note(str(error))
            return 75
        except BrokenPipeError:
            return unread()
        if not is_first:
            return 0
        kind, logging = experiment.data.input_kind, experiment.logging
        has_text = kind.is_tokens and result.data.tokenizer is not None
        if has_text and logging.sample_tokens > 0:
            prompt = logging.sample_prompt
            start = "the start of the held-out data" if prompt is None else f"the prompt {prompt!r}"
            print(f"sample, continuing {start}:\n")
            write_sample(workdir / "sample.txt", result.model, result.params, result.data, experiment)
        elif kind.is_images and has_labels(result.data) and logging.sample_images > 0:
            path = workdir / "predictions.png"
            n_images = logging.sample_images
            n_right, n_drawn = draw_predictions(result.model, result.params, result.data, n_images, path)
            print(f"predictions: {n_right} of {n_drawn} right, drawn in {path}")
        print("\n" + printable(f"run folder: {workdir}   curves: {workdir / 'learning_curves.png'}"))
        folder = f"{shlex.quote(str(workdir))}{plugin_flags(experiment)}"
        more = f"   hyena-jax generate {folder} --prompt TEXT" if has_text else ""
        print(printable(f"next: hyena-jax show {folder}{more}"))
        return 0
