"""What is no number in JSON is text, wherever it stands; all else is as it was."""

import json
import math

from stability.records.sealed_json import jsonable


def test_numbers_that_json_has_not_are_text_however_deep():
    content = {"a": [1.5, (math.nan, {"b": -math.inf})], 3: math.inf, "c": "nan", "d": None}
    expected = {"a": [1.5, ["nan", {"b": "-inf"}]], 3: "inf", "c": "nan", "d": None}
    assert jsonable(content) == expected
    assert type(jsonable(True)) is bool
    assert type(jsonable(7)) is int
    json.dumps(jsonable(content), allow_nan=False)
