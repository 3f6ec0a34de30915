"""Whatever a verb prints with --json is JSON, though a figure be no number."""

import json
import math

from stability.cli.output import print_json


def test_a_figure_that_is_no_number_is_printed_as_text(capsys):
    print_json({"rel_l2": {4: math.nan, 6: -math.inf}, "parts": ("layer_0",)})
    text = capsys.readouterr().out
    assert text.endswith("}\n")
    assert json.loads(text, parse_constant=str.upper) == {
        "rel_l2": {"4": "nan", "6": "-inf"},
        "parts": ["layer_0"],
    }
