"""The page in headless Chromium, if there is one: it opens, its controls work, and nothing is fetched.

`HYENA_JAX_CHROMIUM` names the program; else `chromium`, `chromium-browser` or `google-chrome` is used.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hyena_jax.inspect import json_values, page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("HYENA_JAX_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; HYENA_JAX_CHROMIUM names it")
HOSTILE = "</script><script>document.title='run by a label'</script>"


class Browser:
    """Headless Chromium, spoken to by its DevTools protocol through a pipe; a context manager."""

    def __init__(self, profile: Path):
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The program reads its commands from descriptor 3 and writes to 4.
        ends = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", ends, "bash", CHROMIUM, *flags, f"--user-data-dir={profile}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._count, self._rest, self.events = 0, b"", []
        self._session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def __call__(self, method: str, **params):
        """The result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            more = os.read(self._from, 2**16)
            assert more, "Chromium ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path) -> None:
        self("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def value(self, expression: str):
        """The JSON value of an expression in the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def named(self, method: str) -> list[dict]:
        return [event["params"] for event in self.events if event["method"] == method]


def layer(name: str, rng: np.random.Generator, image: bool) -> dict:
    signed, weights = np.tril(rng.standard_normal((6, 6))), np.tril(rng.random((6, 6)))
    view = {"name": "channel 0", **json_values.packed(signed, triangle=not image)}
    return {
        "name": name,
        "title": f"{name}: mixing matrix",
        "views": [{"name": "all", **json_values.packed(abs(signed), triangle=not image)}, view],
        "besideTitle": "attention",
        "besideAbout": "for comparison",
        "beside": [{"name": "softmax", **json_values.packed(weights, triangle=not image)}],
    }


def content(image: bool) -> page.Content:
    rng = np.random.default_rng(0)
    h = rng.standard_normal((2, 3, 16))
    labels = [HOSTILE, *"a\nb c"]
    filters = json_values._filter("layer 1: hyena", h, 2 * h, 64)
    gate = {"name": "a", "signed": False, **json_values.packed(rng.random((4, 6)))}
    memory = {"memory": [1, 2, 3, 4], "memoryBefore": [1, 1, 2, 2], "memoryAfter": [1, 2, 3, 4]}
    gates = {"name": "layer 2: hawk", "channels": [3, 1, 0, 2], "gates": [gate], **memory}
    chart = json_values.curves(
        {"": [{"step": 1, "train/loss": 2.0}, {"step": 5, "train/loss": 1.0}]}, "loss", "loss"
    )
    losses = page.losses(labels, np.arange(6.0), labels, np.ones(6))
    return page.Content(
        title="a run",
        facts=[],
        config="{}",
        body=page.probabilities(np.array([0.75, 0.25]), 0) if image else losses,
        thumbnails=[("layer 1: hyena", np.eye(6)), ("layer 2: hawk", np.eye(6))],
        lengths=[["layer 1: hyena", "6", "16", "2 (1 to 3)", "2 (1 to 3)"]],
        data={
            "labels": labels,
            "layers": [layer(f"layer {i}", rng, image) for i in (1, 2)],
            "filters": [filters],
            "gates": [gates],
            "charts": {"curve-loss": chart},
            "image": json_values.image(rng.random((4, 6, 1)), (2, 2)) if image else None,
        },
        start="drawn from the run's seed",
    )


def choose(control: str, value: str) -> str:
    """An expression that chooses an option as a user does."""
    return f"""(() => {{ const control = document.getElementById('{control}');
        control.value = '{value}'; control.dispatchEvent(new Event('change')); }})()"""


PIXELS = """(() => { const c = document.getElementById('mix-own');
    return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"""


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_the_page_opens_its_controls_work_and_nothing_is_fetched(tmp_path, image):
    path = tmp_path / "page.html"
    path.write_text(page.page(content(image)), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open(path)
        assert browser.value("document.title") == "a run"
        assert browser.value("document.querySelectorAll('svg.chart').length") == 5
        first = browser.value(PIXELS)
        assert len(first) == 4 * 36
        browser.value(choose("mix-view", "1"))  # with signs: in colour
        assert browser.value(PIXELS) != first
        browser.value(choose("mix-layer", "1"))
        assert (
            browser.value("document.getElementById('mix-own-title').textContent") == "layer 2: mixing matrix"
        )
        readout = "document.getElementById('mix-own-readout').textContent"
        before = browser.value(readout)
        key = "new KeyboardEvent('keydown', {key: 'ArrowUp'})"
        browser.value(f"document.getElementById('mix-own').dispatchEvent({key})")
        assert browser.value(readout) != before
        line = "document.querySelector('#filter-lags path.after').getAttribute('d')"
        before = browser.value(line)
        (filters,) = content(image).data["filters"]
        away = np.abs(np.array(filters["lengthsAfter"][:3]) - filters["quartilesAfter"][1])
        assert browser.value("document.getElementById('filter-channel').value") == str(away.argmin())
        browser.value(choose("filter-channel", str((away.argmin() + 1) % 3)))
        assert browser.value(line) != before
        assert browser.value("document.getElementById('gate-canvas').width") == 6
        if not image:  # the label is text
            strip = browser.value("document.getElementById('mix-strip').textContent")
            assert strip == f"{HOSTILE}a⏎\nb c"
        browser(
            "Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False
        )
        heights = "[...document.querySelectorAll('td.number')].map((cell) => cell.clientHeight)"
        assert max(browser.value(heights)) < 40  # one line each
        assert browser.value("document.documentElement.scrollWidth") <= 400
        requests = {
            params["request"]["url"].partition(":")[0]
            for params in browser.named("Network.requestWillBeSent")
        }
        assert requests <= {"file", "data"}
        assert len([p for p in browser.named("Network.requestWillBeSent") if p["type"] == "Document"]) == 1
        assert browser.named("Runtime.exceptionThrown") == []
        assert [p for p in browser.named("Log.entryAdded") if p["entry"]["level"] == "error"] == []
        # The policy stops what the page does not do itself.
        browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=\"file:///nowhere.png\">')")
        browser.value("1")
        assert "Content Security Policy" in json.dumps(browser.named("Log.entryAdded"))


def test_a_run_that_was_not_trained_shows_one_state(tmp_path):
    whole, path = content(image=False), tmp_path / "page.html"
    filters = [json_values._filter("layer 1: hyena", None, np.ones((1, 3, 16)), 64)]
    gates = [{name: x for name, x in gate.items() if name != "memoryBefore"} for gate in whole.data["gates"]]
    lengths = [["layer 1: hyena", "3", "16", "16 (16 to 16)"]]
    data = {**whole.data, "filters": filters, "gates": gates}
    text = page.page(whole._replace(data=data, lengths=lengths, start=""))
    path.write_text(text, encoding="utf-8")
    assert "before and after training" not in text
    assert "Grey is the filter" not in text
    with Browser(tmp_path / "profile") as browser:
        browser.open(path)
        for chart in ("filter-lags", "filter-spectrum", "filter-hankel", "gate-memory"):
            assert browser.value(f"document.querySelectorAll('#{chart} text.after').length") == 1, chart
            assert browser.value(f"document.querySelectorAll('#{chart} text.before').length") == 0
        length = browser.value("document.getElementById('filter-length').textContent")
        assert length == "Effective length of this channel's filter: 16 lags, of 16."
        assert browser.named("Runtime.exceptionThrown") == []
