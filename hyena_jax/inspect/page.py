"""The page of `hyena-jax show`: one HTML file that needs nothing else and fetches nothing."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyena_jax.system.errors import UserError

MAX_BYTES = 10_000_000
"""The largest page."""
SHADES = 16
"""The style sheet has this many classes s0, s1, ... of the losses' colour."""
BARS = 20
"""And this many widths of bars, w1, w2, ..."""
THUMBNAIL = 104
"""Pixels of the pictures of matrices that need no script."""
FAINT = 0.01
"""In a mixing matrix, black stands for at least this part of a row's diagonal."""


class Content(NamedTuple):
    """What a page shows.

    Attributes:
      facts: rows of a table about the run.
      config: the experiment as JSON text.
      body: sections that differ between text and images, as HTML; everything in them is escaped.
      thumbnails: for each layer of `data` its name and a matrix.
      lengths: rows of the table of effective lengths.
      data: JSON values for the script.
      start: where the parameters before training come from; empty if only one state of them is shown.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    config: str
    body: str
    thumbnails: Sequence[tuple[str, np.ndarray]]
    lengths: Sequence[Sequence[str]]
    data: dict[str, Any]
    start: str = ""


def page(content: Content) -> str:
    """The page as text.

    Text from outside is escaped; in the data `<` is written as an escape of JSON, so that no text ends the
    element. The content security policy allows only this page's own script and style, by their digests, and
    images in the page. Raises UserError above `MAX_BYTES`.
    """
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(content.data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(content.title)
    config = f"<details><summary>config.json</summary><pre>{html.escape(content.config)}</pre></details>"
    sections = [
        _curves(content),
        content.body,
        _mixing(content),
        _filters(content),
        _gates(content),
        _activations(content),
        _section("config", "Every setting", "The experiment as the run's folder keeps it.", config),
    ]
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{_facts(content)}
<noscript><p>Without JavaScript there are tables, the text and small pictures, but no charts.</p></noscript>
{"".join(section for section in sections if section)}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
    size = len(text.encode())
    if size > MAX_BYTES:
        raise UserError(
            f"must be lower: the page would have {size / 1e6:.1f} MB, and {MAX_BYTES / 1e6:g} MB is the most",
            "max_tokens",
        )
    return text


def _digest(text: str) -> str:
    """A source expression of a content security policy."""
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A table; the columns after the first hold numbers."""

    def row(cells: Sequence[str], kind: str) -> str:
        first, *numbers = map(html.escape, cells)
        return f"<{kind}>{first}</{kind}>" + "".join(f'<{kind} class="number">{x}</{kind}>' for x in numbers)

    lines = [row(header, "th"), *(row(cells, "td") for cells in rows)]
    return _scrolled("".join(f"<tr>{line}</tr>" for line in lines))


def _scrolled(rows: str) -> str:
    """A table that scrolls by itself where the page is too narrow."""
    return f'<div class="table"><table>{rows}</table></div>'


def _section(name: str, title: str, about: str, inside: str) -> str:
    return f'<section id="{name}">\n<h2>{title}</h2>\n<p>{about}</p>\n{inside}\n</section>\n'


def _facts(content: Content) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in content.facts
    )
    return _scrolled(rows)


def _curves(content: Content) -> str:
    charts = [name for name in content.data["charts"] if name.startswith("curve-")]
    if not charts:
        return ""
    inside = '<div class="pair needs-script">' + "".join(f'<figure id="{name}"></figure>' for name in charts)
    return _section("curves", "How it was trained", "The curves from the run's metrics.", inside + "</div>")


def losses(labels: Sequence[str], nats: np.ndarray, guesses: Sequence[str], probability: np.ndarray) -> str:
    """The text with each token in the shade of its loss; what the model expected shows on hovering."""
    known = nats[np.isfinite(nats)]
    most = float(known.max(initial=1e-9))
    spans = []
    for label, loss, guess, p in zip(labels, nats, guesses, probability, strict=True):
        shown = "⏎\n" if label == "\n" else label
        if np.isfinite(loss):
            shade = min(int(loss / most * SHADES), SHADES - 1)
            about = f"{label!r}: loss {loss:.2f} nats, p = {np.exp(-loss):.3g}"
            about += f"; most probable: {guess!r}, p = {p:.3g}"
        else:
            shade, about = 0, f"{label!r}: not predicted"
        spans.append(f'<span class="s{shade}" title="{html.escape(about)}">{html.escape(shown)}</span>')
    mean = f"Mean {known.mean():.3f} nats per predicted token." if known.size else "No token is predicted."
    scale = f'0 <span class="scale"></span> {most:.2f} nats'
    inside = f'<p class="soft">{mean} {scale}</p><div class="text">{"".join(spans)}</div>'
    about = (
        "The redder a token, the less the model expected it from the tokens before it. The loss of a token is"
        " minus the logarithm of the probability that the model gave it. Hover over a token for numbers."
    )
    return _section("losses", "The loss of each token", about, inside)


def samples(texts: Mapping[str, str]) -> str:
    """What runs, by name, wrote when their training ended."""
    inside = "".join(
        f'<h3>{html.escape(name)}</h3><div class="text">{html.escape(text)}</div>'
        for name, text in texts.items()
    )
    about = "The prompt and its continuation, drawn from the model's probabilities at the end of training."
    return _section("samples", "What it writes", about, inside) if inside else ""


def probabilities(values: np.ndarray, label: int | None) -> str:
    """The probability of each class as bars; `label` is the true class."""
    order = np.argsort(-values)[:BARS]
    rows = []
    for i in order:
        width = round(float(values[i]) * BARS)
        bar = f'<span class="bar w{width}"></span>' if width else ""
        true = " (true label)" if i == label else ""
        rows.append(f"<tr><td>class {i}{true}</td><td class='number'>{values[i]:.4f}</td><td>{bar}</td></tr>")
    about = "The classes by the probability that the model gives them."
    return _section("probabilities", "What the model sees in the image", about, _scrolled("".join(rows)))


def _mixing(content: Content) -> str:
    if not content.thumbnails:
        return ""
    thumbs = "".join(
        f'<figure data-layer="{i}"><img alt="" src="{picture(matrix)}">'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for i, (name, matrix) in enumerate(content.thumbnails)
    )
    is_image = content.data["image"] is not None
    unit, units = ("patch", "patches") if is_image else ("token", "tokens")
    below = (
        '<canvas id="mix-patches"></canvas>'
        if is_image
        else '<div class="text reading" id="mix-strip"></div>'
    )
    about = (
        f"Row t, from the top, says how much the mixer's output at {unit} t takes from each {unit}: column s,"
        f" from the left, is the weight of {unit} s, gates included. A convolution has the same weight along"
        f" each diagonal, and gates scale its rows and columns; attention chooses {units} by their content."
        f" Layers and {units} count from 1, channels and heads from 0."
    )
    inside = f"""<div class="thumbs">{thumbs}</div>
<div class="needs-script">
<div class="controls">
<label>layer <select id="mix-layer"></select></label>
<label>left <select id="mix-view"></select></label>
<label>right <select id="mix-beside"></select></label>
<label><input type="checkbox" id="mix-relative" checked> each row relative to its largest weight</label>
<label><input type="checkbox" id="mix-diagonal" checked> leave out the diagonal</label>
</div>
<p class="soft">Black is large and white is 0; where weights have signs, red is positive and blue negative.
The diagonal, what a {unit} takes from itself, is often by far the largest and is left out (pale blue); a row
whose other weights are below 1% of it stays pale. Move over a matrix to choose a row; arrow keys work,
too.</p>
<div class="pair matrices">
<figure><h3 id="mix-own-title"></h3><canvas id="mix-own" tabindex="0"></canvas>
<p class="readout" id="mix-own-readout"></p></figure>
<figure><h3 id="mix-other-title"></h3><canvas id="mix-other" tabindex="0"></canvas>
<p class="readout" id="mix-other-readout"></p><p class="soft" id="mix-other-about"></p></figure>
</div>
<h3 id="mix-strip-title"></h3>
<p class="soft">The same row on the {"image" if is_image else "text"}. Click a {unit} to see its row.</p>
{below}
</div>"""
    return _section("mixing", f"What each {unit} reads: mixing matrices", about, inside)


def _filters(content: Content) -> str:
    if not content.data["filters"]:
        return ""
    header, title = ("layer", "channels", "lags", "effective length (quartiles)"), "Long filters"
    compared = ""
    if content.start:
        header = (*header[:3], "effective length before (quartiles)", "after (quartiles)")
        title += ", before and after training"
        compared = f" Grey is the filter before training, {content.start}, and red the trained one."
    lengths = table(content.lengths, header)
    about = (
        f"A long convolution adds up its past inputs, each times the filter at that lag.{compared}"
        " The effective length is the number of lags, from 0, that hold 95% of a filter's energy; the table"
        " gives its median over all channels, with quartiles. The charts open with a channel near the median;"
        " channels count from 0. Hankel singular values say how large a recurrence must be to do the same:"
        " the faster they fall, the smaller."
    )
    inside = f"""{lengths}
<div class="needs-script">
<div class="controls">
<label>layer <select id="filter-layer"></select></label>
<label>filter <select id="filter-which"></select></label>
<label>channel <select id="filter-channel"></select></label>
<label><input type="checkbox" id="filter-log"> logarithmic lags</label>
</div>
<p class="soft" id="filter-length"></p>
<div class="pair">
<figure id="filter-lags"></figure>
<figure id="filter-spectrum"></figure>
<figure id="filter-hankel"></figure>
</div>
</div>"""
    return _section("filters", title, about, inside)


def _gates(content: Content) -> str:
    if not content.data["gates"]:
        return ""
    about = (
        "Every channel of an RG-LRU multiplies its state by a at each token and adds the gated input. Its"
        " memory length, -1 / log a (with the mean of log a over the text), is the number of tokens after"
        " which the state has shrunk by the factor e = 2.7. A recurrence gate r near 0 keeps the state; near"
        " 1 the channel forgets as fast as it can."
    )
    inside = """<div class="needs-script">
<div class="controls">
<label>layer <select id="gate-layer"></select></label>
<label>show <select id="gate-which"></select></label>
</div>
<div class="pair">
<figure><h3>Over the text, left to right; the channel with the longest memory on top</h3>
<canvas class="gates" id="gate-canvas"></canvas><p class="readout" id="gate-readout"></p></figure>
<figure id="gate-memory"></figure>
</div>
</div>"""
    return _section("gates", "Memory and gates of the RG-LRU", about, inside)


def _activations(content: Content) -> str:
    if "activations" not in content.data["charts"]:
        return ""
    about = (
        "How large the residual stream is before each layer and after the last, and what each part adds: dots"
        " between two numbers of layers passed belong to the layer between them."
    )
    inside = '<div class="pair needs-script"><figure id="activations"></figure></div>'
    return _section("activations-section", "Sizes of activations by layer", about, inside)


def picture(matrix: np.ndarray) -> str:
    """A matrix without its diagonal, in grey, as a PNG in a data URL; each row relative to its largest.

    A row whose other weights are below `FAINT` of its diagonal stays pale, as in page.js.
    """
    from matplotlib.image import imsave

    diagonal = np.abs(np.diag(matrix))[:, None]
    matrix = np.abs(matrix * (1 - np.eye(len(matrix))))
    largest = np.maximum(matrix.max(axis=1, keepdims=True), FAINT * diagonal)
    rows = matrix / np.where(largest > 0, largest, 1)
    step = -(-len(rows) // (2 * THUMBNAIL))
    file = io.BytesIO()
    imsave(file, rows[::step, ::step], cmap="Greys", vmin=0, vmax=1, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
