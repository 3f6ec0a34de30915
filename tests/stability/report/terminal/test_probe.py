"""A probe in the terminal: what stands out is said first, no line is broken."""

import re

import pytest
from rich.console import Console

from stability.cli.main import main
from stability.records.events import Event
from stability.report.terminal.probe import print_probe
from tests.sampling import one_in
from tests.stability.report.synthetic_probe import write_probe

PLANTED = "model.layers.2.self_attn, head 1: error ratio stands out since step 20"


def _printed(folder, width=120):
    console = Console(width=width, record=True, force_terminal=False)
    print_probe(folder, console)
    return console.export_text()


def test_the_table_says_what_stands_out_and_has_a_line_a_layer(tmp_path):
    text = _printed(write_probe(tmp_path, planted=(2, 1)))
    assert text.index(PLANTED) < text.index("worst")
    rows = [line for line in text.splitlines() if re.match(r"model\.layers\.\d", line)]
    assert [row.split()[0] for row in rows[-4:]] == [
        f"model.layers.{i}.self_attn" for i in range(4)
    ]
    assert "4 layers, 6 of 55 steps looked at" in text
    assert "own" in text


@pytest.mark.parametrize("width", one_in(2, [80, 100, 60, 200]))
def test_a_narrow_terminal_gets_fewer_columns_not_broken_ones(tmp_path, width):
    text = _printed(write_probe(tmp_path), width)
    table = text[text.index("layer ") :]
    assert "…" not in table.split("error:")[0]
    assert max(len(line) for line in text.splitlines()) <= width
    assert ("logit" in text) == (width >= 60)


def test_a_healthy_probe_says_so_and_one_without_golden_has_errors_of_gradients(tmp_path):
    text = _printed(write_probe(tmp_path, golden=False))
    assert "No layer or head stands out from the others, and none is biased" in text
    assert "ratio" not in text
    assert "of dq" in text


def test_events_are_listed_and_the_rest_counted(tmp_path):
    events = tuple(Event(step, "finding", "layer_0", f"wrong {step}") for step in range(12))
    text = _printed(write_probe(tmp_path, events=(Event(3, "alert", "", "too big"), *events)))
    assert "alert  step 3: too big" in text
    assert "finding  step 0, layer_0: wrong 0" in text
    assert "and 5 more" in text


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, 0),
        ({"planted": (2, 1)}, 1),
        ({"events": (Event(0, "finding", "layer_0", "flash:fa2: RuntimeError: no kernel"),)}, 1),
    ],
    ids=["healthy", "beyond a limit", "raised"],
)
def test_show_answers_by_the_exit_code_of_the_probe(tmp_path, options, code):
    assert main(["show", str(write_probe(tmp_path, **options))]) == code
