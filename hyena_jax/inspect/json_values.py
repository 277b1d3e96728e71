"""Everything that a page about a run shows, as JSON values.

Axes: L tokens or patches, D channels, N filters or matrices, k singular values.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
import optax

from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.inspect import mixers
from hyena_jax.inspect.mixers import jacobian_norms, mixing, plain_attention, strength
from hyena_jax.inspect.tracing import Layer, Trace

# Bytes of all matrices, of all filters and of all gates of a page, before base64.
MATRIX_BYTES, FILTER_BYTES, GATE_BYTES = 4_000_000, 1_500_000, 1_000_000
# Of a layer: matrices that are shown by themselves, and channels of its filters.
MAX_HEADS, MAX_CHANNELS = 8, 64
# Points of a curve over lags or frequencies.
MAX_POINTS = 512
# Beyond so many gradients, the norms of a Jacobian are estimated by so many directions at each position.
MAX_GRADIENTS, PROBES = 8192, 16
# Of a layer: channels whose Hankel matrices are decomposed, and their leading singular values.
MAX_SPECTRA, MAX_SINGULAR_VALUES = 16, 48

Json = dict[str, Any]


class View(NamedTuple):
    """A matrix [L, L] with its name."""

    name: str
    matrix: np.ndarray


class Mixed(NamedTuple):
    """How a layer mixes: views under one title, and whether any output reads later inputs.

    `about` says what there is to see; it may be empty.
    """

    title: str
    views: list[View]
    is_causal: bool
    about: str = ""


def mixed(layer: Layer, params: optax.Params, n_heads: int) -> Mixed:
    """The mixing matrices of a layer: all together, and the `n_heads` that contribute most.

    `params` are the layer's own.
    """
    is_causal = bool(getattr(layer.mixer.config, "causal", True))
    found = mixing(layer.mixer, params, layer.inputs, layer.handed)
    name = mixer_name(layer.mixer)
    if found is None:
        n_outputs = layer.inputs.shape[1] * layer.inputs.shape[2]
        probes = None if n_outputs <= MAX_GRADIENTS else PROBES
        options = {"handed": layer.handed} if layer.handed else {}
        apply = partial(layer.mixer.apply, {"params": params}, **options)
        norms = np.asarray(jacobian_norms(apply, layer.inputs, probes))
        if is_causal:  # an FFT leaves rounding errors there
            norms = np.tril(norms)
        how = "exact" if probes is None else f"estimated by {probes} random directions at each position"
        title = f"{name}: norms of its Jacobian's blocks, {how}"
        return Mixed(title, [View("norm of each block", norms)], is_causal)
    matrices = np.asarray(found.matrices[0])
    n_all = len(matrices)
    is_by_head = found.values.shape[-1] > 1
    unit = "head" if is_by_head else "channel"
    contribution = np.square(np.asarray(found.outputs()[0], np.float64)).sum((0, 2))
    chosen = sorted(np.argsort(-contribution)[:n_heads]) if n_all > 1 else []
    together = f"all {n_all} {unit}s: root mean square" if n_all > 1 else f"its one {unit}"
    first = np.asarray(strength(found.matrices)[0]) if n_all > 1 else matrices[0]
    views = [View(together, first)] + [View(f"{unit} {i}", matrices[i]) for i in chosen]
    return Mixed(f"{name}: mixing matrix", views, is_causal)


def plain(layer: Layer) -> Mixed:
    """Softmax attention without parameters on a layer's input."""
    is_causal = bool(getattr(layer.mixer.config, "causal", True))
    weights = np.asarray(plain_attention(layer.inputs, is_causal)[0])
    title = "softmax attention on the same input, without parameters"
    about = (
        "For comparison: each position weighs the others by how alike the mixer's inputs x are, standardised"
        " and without trained weights. In the first layer that mostly finds equal tokens or patches."
    )
    return Mixed(title, [View("softmax(x·x / √D)", weights)], is_causal, about)


def mixer_name(mixer: nn.Module) -> str:
    """The name of a mixer in configs."""
    return MIXER_CONFIGS.part_of(type(mixer.config)).name


def layer_name(index: int, layer: Layer) -> str:
    """For people, from 1."""
    return f"layer {index + 1}: {mixer_name(layer.mixer)}"


class Other(NamedTuple):
    """Another run at work on the same input: its name, folder, trace and parameters."""

    name: str
    workdir: Path
    seen: Trace
    params: optax.Params


def matrices(
    seen: Trace, params: optax.Params, other: Other | None, advance: Callable[[], None]
) -> list[tuple[Json, np.ndarray]]:
    """For each layer its mixing matrices next to attention's or another run's, and the first of them.

    As many matrices of single heads are kept as fit in `MATRIX_BYTES`; if even one of each layer does not,
    layers are left out, evenly spaced. `other` None compares with attention without parameters; `advance` is
    called after each layer.
    """
    length = seen.layers[0].inputs.shape[1] if seen.layers else 1
    most = max(MATRIX_BYTES // length**2, 2)
    shown = evenly(len(seen.layers), most // 2)
    n_heads = min(MAX_HEADS, most // (2 * max(len(shown), 1)) - 1)
    found = []
    for i in shown:
        layer = seen.layers[i]
        own, aside = mixed(layer, layer.own(params), n_heads), plain(layer)
        if other is not None:
            j = i * len(other.seen.layers) // len(seen.layers)  # as deep in its model
            its = other.seen.layers[j]
            aside = mixed(its, its.own(other.params), n_heads)
            aside = aside._replace(title=f"{other.name}, layer {j + 1}, {aside.title}")
        values = {
            "name": layer_name(i, layer),
            "title": own.title,
            "views": [_view(view, own.is_causal) for view in own.views],
            "besideTitle": aside.title,
            "besideAbout": aside.about,
            "beside": [_view(view, aside.is_causal) for view in aside.views],
        }
        found.append((values, own.views[0].matrix))
        advance()
    return found


def _view(view: View, is_causal: bool) -> Json:
    return {"name": view.name, **packed(view.matrix, triangle=is_causal)}


def filters(
    before: Sequence[tuple[Layer, optax.Params]] | None, after: Sequence[tuple[Layer, optax.Params]]
) -> list[Json]:
    """The long filters of every layer over all lags of its mixer, before (None: unknown) and after training.

    The layers come with their own parameters.
    """
    pairs = []
    for i, (layer, new) in enumerate(after):
        h = mixers.filters(layer.mixer, new, layer.mixer.max_len)
        if h is not None:
            old = before and mixers.filters(layer.mixer, before[i][1], layer.mixer.max_len)
            pairs.append((i, layer, old, h))
    numbers = sum(h.shape[0] * min(h.shape[2], MAX_POINTS) for _, _, _, h in pairs)
    most = int(np.clip(FILTER_BYTES // (8 * max(numbers, 1)), 4, MAX_CHANNELS))
    return [_filter(layer_name(i, layer), *both, most) for i, layer, *both in pairs]


def _filter(name: str, before: np.ndarray | None, after: np.ndarray, most: int) -> Json:
    count, width, length = after.shape
    channels = evenly(width, most)
    lags = evenly(length, MAX_POINTS)
    frequencies = evenly(length + 1, MAX_POINTS)
    page: Json = {
        "name": name,
        "count": count,
        "width": width,
        "length": length,
        "channels": channels,
        "lags": lags,
        "frequencies": [f / (2 * length) for f in frequencies],
    }
    for when, h in (("Before", before), ("After", after)):
        if h is None:
            continue
        chosen = h[:, channels].reshape(-1, length)
        magnitudes = mixers.spectrum(chosen)[:, frequencies]
        floor = max(float(magnitudes.max(initial=0)), 1e-30) * 1e-6
        lengths = mixers.effective_length(h)
        page[when.lower()] = packed(chosen[:, lags], wide=True)
        page[f"spectrum{when}"] = packed(20 * np.log10(np.maximum(magnitudes, floor)), wide=True)
        page[f"lengths{when}"] = mixers.effective_length(chosen).tolist()
        page[f"quartiles{when}"] = np.quantile(lengths, (0.25, 0.5, 0.75)).tolist()
        some = chosen[evenly(len(chosen), MAX_SPECTRA)]
        values = mixers.hankel_values(some, MAX_SINGULAR_VALUES) if length > 4 else np.ones((1, 1))
        relative = values / np.where(values[:, :1] > 0, values[:, :1], 1)
        page[f"hankel{when}"] = rounded(np.median(relative, axis=0))
    return page


def recurrences(
    before: Sequence[tuple[Layer, optax.Params]] | None, after: Sequence[tuple[Layer, optax.Params]]
) -> list[Json]:
    """Memory lengths and gates of every layer with an RG-LRU; arguments as of `filters`."""
    found = []
    for i, (layer, new) in enumerate(after):
        now = mixers.gates(layer.mixer, new, layer.inputs)
        if now is not None:
            old = None
            if before is not None:
                old_layer, old_params = before[i]
                old = mixers.gates(old_layer.mixer, old_params, old_layer.inputs)
            found.append((i, layer, old, now))
    size = sum(3 * now.decay.shape[1] for *_, now in found)
    most = max(int(GATE_BYTES // max(size, 1)), 8)
    return [_recurrence(layer_name(i, layer), *both, most) for i, layer, *both in found]


def _recurrence(name: str, before: Any, now: Any, most: int) -> Json:
    memory = np.asarray(mixers.memory_lengths(now.decay)[0], np.float64)
    order = np.argsort(memory)
    chosen = order[evenly(len(order), most)]
    named = {
        "factor of the state a": now.decay,
        "recurrence gate r": now.recurrence,
        "input gate i": now.input,
    }
    old = None if before is None else np.asarray(mixers.memory_lengths(before.decay)[0], np.float64)
    return {
        "name": name,
        "channels": chosen.tolist(),
        "memory": rounded(memory[chosen]),
        "memoryAfter": rounded(memory[order]),
        **({} if old is None else {"memoryBefore": rounded(np.sort(old))}),
        "gates": [
            {"name": title, "signed": bool((values < 0).any()), **packed(np.asarray(values)[0, :, chosen])}
            for title, values in named.items()
        ],
    }


def activations(seen: Trace) -> Json | None:
    """A chart of the activations' sizes by layer; None for a model without residual blocks."""
    if not seen.blocks:
        return None
    stream = [float(block.stream.mean()) for block in seen.blocks] + [float(seen.last.mean())]
    middle = [i + 0.5 for i in range(len(seen.blocks))]
    parts = {
        "added by the mixer": ("after", [float(block.mixer.mean()) for block in seen.blocks]),
        "added by the feed-forward part": ("third", [float(block.mlp.mean()) for block in seen.blocks]),
    }
    series = [
        {"name": "residual stream", "colour": "fourth", "x": list(range(len(stream))), "y": rounded(stream)}
    ]
    series += [
        {"name": name, "colour": colour, "x": middle, "y": rounded(y), "dots": True}
        for name, (colour, y) in parts.items()
    ]
    return {
        "series": series,
        "zero": True,
        "xlabel": "layers passed",
        "title": "Root mean square over the channels, mean over the positions",
    }


def curves(rows_of: Mapping[str, Sequence[Json]], name: str, label: str) -> Json | None:
    """A chart of a metric against the step; None if it was not measured.

    `rows_of` has the rows of `metrics.jsonl` of this run, as "", and perhaps of another, as ", NAME".
    """
    series = []
    parts = (("train", "training, single batches"), ("validation", "validation"))
    lines = [(rows, part, title + run) for run, rows in rows_of.items() for part, title in parts]
    for (rows, part, title), colour in zip(lines, ("before", "after", "third", "fourth"), strict=False):
        points = [(row["step"], row.get(f"{part}/{name}")) for row in rows]
        points = [(step, value) for step, value in points if value is not None]
        if points:
            points = [points[i] for i in evenly(len(points), MAX_POINTS)]
            steps, values = zip(*points, strict=True)
            series.append({"name": title, "colour": colour, "x": steps, "y": rounded(values)})
    return {"series": series, "xlabel": "step", "title": label} if series else None


def image(pixels: np.ndarray, patch: tuple[int, int]) -> Json:
    """An image [height, width, colours] as 8-bit colours by pixel, with its patches."""
    grid = [pixels.shape[0] // patch[0], pixels.shape[1] // patch[1]]
    shades = np.rint(255 * (pixels - pixels.min()) / max(np.ptp(pixels), 1e-12)).astype(int)
    if shades.shape[-1] != 3:  # grey: drawn as ink on paper
        shades = np.repeat(255 - shades[..., :1], 3, axis=-1)
    return {
        "pixels": shades.reshape(-1, 3).tolist(),
        "size": pixels.shape[:2],
        "patch": patch,
        "grid": grid,
    }


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 .. count - 1, evenly spaced, with both ends."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, max(most, 1)).round().astype(int)).tolist()


def rounded(values: Any) -> list[float | None]:
    """Numbers with four digits; None where a number is not finite."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in np.asarray(values, np.float64)]


def packed(matrix: Any, triangle: bool = False, wide: bool = False) -> Json:
    """A matrix as integers of one byte in base64, with one factor for each row; `wide` takes two bytes.

    `triangle` keeps only the entries up to the diagonal.
    """
    matrix = np.nan_to_num(np.asarray(matrix, np.float64))
    dtype = np.dtype("<i2" if wide else "i1")
    scale = np.abs(matrix).max(axis=1, initial=0) / np.iinfo(dtype).max
    integers = np.rint(matrix / np.where(scale > 0, scale, 1)[:, None]).astype(dtype)
    kept = integers[np.tri(*matrix.shape, dtype=bool)] if triangle else integers
    return {
        "bytes": base64.b64encode(kept.tobytes()).decode(),
        "scales": [float(f"{s:.5g}") for s in scale],
        "columns": matrix.shape[1],
        "triangle": triangle,
        "wide": wide,
    }
