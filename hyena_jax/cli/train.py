"""`hyena-jax train`: trains, then shows a sample of the text or predictions on images."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hyena_jax.cli.base import OfConfig, fail, note, say, unread
from hyena_jax.config import Cluster, Experiment, plugin_flags
from hyena_jax.config.flags import FLAT, PluginFlags, positional, take_flag
from hyena_jax.system.errors import UserError, as_urls
from hyena_jax.system.malloc import keep_freed_memory
from hyena_jax.system.startup import import_jax, keep_compiled_programs, start_devices
from hyena_jax.system.storage.location import Location, is_url, location_of
from hyena_jax.training.options import NO_OPTIONS, StartOptions


@dataclass(frozen=True)
class Train(OfConfig):
    """Train CONFIG[:VARIANT] in a folder, or continue the run in that folder.

    `hyena-jax train --resume DIR [flags]` continues the run in DIR with its own settings, without CONFIG and
    --workdir; flags, such as --training.steps, change a setting.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path | Location
    """Folder of the run; created if missing, continued if it holds this experiment; or gs://BUCKET/NAME."""
    options: StartOptions = field(default=NO_OPTIONS, metadata=FLAT)
    trains: ClassVar[bool] = True
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
            from hyena_jax.system.storage.mirror import opened

            path = opened(folder, "--resume") if is_url(folder) else Path(folder)
            rest = [str(path / "config.json"), "--workdir", str(path), *rest]
        return super().take(called, rest)

    def run(self, arguments: Sequence[str]) -> int:
        import_jax()
        keep_compiled_programs(note)
        keep_freed_memory()

        from hyena_jax.generation.sample import draw_predictions, has_labels, write_sample
        from hyena_jax.parallel import processes
        from hyena_jax.system.output import Output
        from hyena_jax.system.signals import STOPPED_CODE, Interrupted
        from hyena_jax.system.storage.mirror import share
        from hyena_jax.training.hooks import Diverged
        from hyena_jax.training.run import train

        experiment, workdir = self.experiment, self.workdir
        processes.join(self.cluster, experiment.parallel.heartbeat_timeout)
        start_devices()
        console = Output()
        try:
            with processes.leaving_on_failure(fail, location_of(workdir) is not None):
                result = train(experiment, workdir, console, self.options)
                is_first = processes.is_first()
                processes.leave()
        except Diverged as error:
            return fail(error, 4) if processes.is_first() else 4
        except Interrupted as error:
            if processes.is_first():
                note(str(error))
            return STOPPED_CODE
        except BrokenPipeError:
            return unread()
        if not is_first:
            return 0
        kind, logging = experiment.data.input_kind, experiment.logging
        has_text = kind.is_tokens and result.data.tokenizer is not None and not has_labels(result.data)
        if has_text and logging.sample_tokens > 0:
            prompt = logging.sample_prompt
            start = "the start of the held-out data" if prompt is None else f"the prompt {prompt!r}"
            print(f"sample, continuing {start}:\n")
            path = workdir / "sample.txt"
            write_sample(path, result.model, result.params, result.data, experiment)
            share(path)
        elif kind.is_images and has_labels(result.data) and logging.sample_images > 0:
            path = workdir / "predictions.png"
            n_images = logging.sample_images
            n_right, n_drawn = draw_predictions(result.model, result.params, result.data, n_images, path)
            share(path)
            say(f"predictions: {n_right} of {n_drawn} right, drawn in {path}")
        say(f"\nrun folder: {workdir}   curves: {workdir / 'learning_curves.png'}")
        folder = f"{shlex.quote(as_urls(workdir))}{plugin_flags(experiment)}"
        more = f"   hyena-jax generate {folder} --prompt TEXT" if has_text else ""
        say(f"next: hyena-jax show {folder}{more}")
        return 0
