"""What verbs print with --json is JSON, and their exit codes are those of one table."""

import json
import math
import re
from pathlib import Path

from stability.cli.main import main
from stability.cli.output import EXIT_CODES, print_json

ROOT = Path(__file__).parents[3]


def test_a_figure_that_is_no_number_is_printed_as_text(capsys):
    print_json({"rel_l2": {4: math.nan, 6: -math.inf}, "parts": ("layer_0",)})
    text = capsys.readouterr().out
    assert text.endswith("}\n")
    assert json.loads(text, parse_constant=str.upper) == {
        "rel_l2": {"4": "nan", "6": "-inf"},
        "parts": ["layer_0"],
    }


def test_help_prints_the_table_of_exit_codes(capsys):
    assert main(["--help"]) == 0
    table = capsys.readouterr().out.partition("exit codes:\n")[2]
    assert [line.split(None, 1) for line in table.splitlines()] == [
        [str(code), meaning] for code, meaning in EXIT_CODES.items()
    ]


def test_the_readme_names_the_exit_codes_of_the_table():
    (said,) = re.findall(r"\*\*Exit codes\*\*: (.*?)\n- ", (ROOT / "README.md").read_text(), re.S)
    parts = [" ".join(part.split()) for part in said.rstrip(".").split(";")]
    assert parts == [f"{code} {meaning}" for code, meaning in EXIT_CODES.items()]
