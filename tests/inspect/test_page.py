"""The page needs nothing else, keeps text from outside as text, and allows only its own script and style."""

import base64
import html
import io
import json
import re
from hashlib import sha256

import numpy as np
import pytest
from matplotlib.image import imread

from hyena_jax.inspect import json_values, page
from hyena_jax.system.errors import UserError

HOSTILE = "</script><script>alert(1)</script><!--<b onclick='x'>&amp;\u2028"


def content(label: str = "a", **data) -> page.Content:
    values = {"labels": [label], "layers": [], "filters": [], "gates": [], "charts": {}, "image": None}
    body = page.losses([label, "\n"], np.array([np.nan, 1.0]), ["", label], np.array([np.nan, 0.5]))
    return page.Content(
        title=label,
        facts=[("shown", label)],
        config=json.dumps({"name": label}),
        body=body,
        thumbnails=[(label, np.eye(3))],
        lengths=[],
        data=values | data,
    )


def test_text_from_outside_stays_text():
    text = page.page(content(HOSTILE))
    assert text.count("<script") == text.count("</script>") == 2
    assert "<b onclick" not in text
    assert "<!--" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    assert json.loads(data)["labels"] == [HOSTILE]
    assert html.escape(HOSTILE) in text


def test_the_policy_allows_the_pages_own_script_and_style():
    text = page.page(content())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.S)
        digest = base64.b64encode(sha256(inside.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    # Such attributes would need 'unsafe-inline', and such addresses a network.
    assert not re.search(r"<[^>]*\s(style|on[a-z]+)=", text.partition("<script type")[0])
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def test_a_page_that_is_too_large_is_refused():
    with pytest.raises(UserError, match=r"max_tokens must be lower: the page would have 10\.\d MB"):
        page.page(content(filler="x" * 10_000_000))


def test_the_largest_settings_fit():
    """48 layers of 512 tokens, and what the filters and gates take at most."""
    square = np.random.default_rng(0).standard_normal((512, 512))
    one = json_values.packed(square, triangle=False)
    most = json_values.MATRIX_BYTES // 512**2
    size = most * len(json.dumps(one)) + (json_values.FILTER_BYTES + json_values.GATE_BYTES) * 4 / 3
    assert size < page.MAX_BYTES


@pytest.mark.parametrize("options", [{}, {"triangle": True}, {"wide": True}])
def test_packed_numbers_can_be_unpacked(options):
    matrix = np.tril(np.random.default_rng(0).standard_normal((5, 5)))
    matrix[2] = 0
    values = json_values.packed(matrix, **options)
    dtype = "<i2" if values["wide"] else "i1"
    flat = np.frombuffer(base64.b64decode(values["bytes"]), dtype)
    integers = np.zeros((5, 5))
    integers[np.tri(5, dtype=bool) if values["triangle"] else np.ones((5, 5), bool)] = flat
    error = np.abs(integers * np.array(values["scales"])[:, None] - matrix).max(1)
    steps = 32767 if values["wide"] else 127
    assert (error <= 0.51 * np.abs(matrix).max(1) / steps + 1e-5 * np.abs(matrix).max(1)).all()


def test_a_row_that_reads_only_itself_stays_pale():
    matrix = np.diag([0.0, 1.0, 1.0])
    matrix[1, 0], matrix[2, 1] = 1e-5, 0.1
    data = page.picture(matrix).partition("base64,")[2]
    shades = imread(io.BytesIO(base64.b64decode(data)))[..., 0]
    assert shades[1, 0] > 0.99
    assert shades[2, 1] == shades.min() == 0


def test_evenly_spaced():
    assert json_values.evenly(3, 5) == [0, 1, 2]
    assert json_values.evenly(100, 3) == [0, 50, 99]
    assert json_values.evenly(0, 3) == []
