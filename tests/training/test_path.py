"""hyena_jax/README.md draws a run as ten boxes, in the order in which a run reaches them."""

import re
import sys
import threading
from pathlib import Path

import pytest

import hyena_jax
from hyena_jax.training.run import train

PACKAGE = Path(hyena_jax.__file__).parent
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")
BOXES = re.findall(r"^ +(\w+) +(\w+/\w+\.py) ", PAGE.split("```")[3], re.MULTILINE)


def reached(experiment, workdir, console) -> list[tuple[str, str]]:
    """The boxes in the order in which a run first calls their functions."""
    found, names = [], {name for name, _ in BOXES}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name in names:  # first, as it is asked millions of times
            path = Path(code.co_filename)
            box = code.co_name, path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""
            if box in BOXES and box not in found:
                found.append(box)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        train(experiment, workdir, console)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.wide
def test_a_run_reaches_the_boxes_in_the_order_of_the_page(experiment, tmp_path, console):
    assert len(BOXES) == 10
    assert reached(experiment, tmp_path / "run", console) == BOXES
