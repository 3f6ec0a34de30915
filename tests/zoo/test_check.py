"""`check_attention` over the whole zoo: it passes what is right, fails what is wrong, says what."""

import re

import pytest

from attention_kernels.testing import check_attention
from attention_kernels.testing.cells import DTYPES, QUICK
from tests.sampling import one_in
from tests.zoo.right import RIGHT
from tests.zoo.wrong import WRONG

RIGHT_SAMPLE = {"by hand"}
WRONG_SAMPLE = {
    "scale x 1.005",
    "P x 1.005 in the backward",
    "empty rows are the mean of v",
    "keys from 1024 on are not read",
}
FEW = [x for x in QUICK if x.law in ("normal", "long rows") and x.shape.query_len < 130]
NAMED = 0.9
"""The share of wrong attentions whose sentence must have their noun."""


def _in_their_dtypes(zoo):
    return [
        pytest.param(entry, format, id=f"{entry.name}, {format}")
        for format, dtype in DTYPES.items()
        for entry in zoo
        if dtype in entry.dtypes
    ]


def _check(entry, format, quick):
    return check_attention(entry.function, dtypes=[format], quick=quick, name=entry.name)


def _name(entry):
    return entry.name


def _named(entry, report):
    """Whether the sentence, without the attention's own name, has the noun."""
    said = report.sentence.removeprefix(entry.name)
    return re.search(entry.noun, said, re.IGNORECASE) is not None


@pytest.mark.parametrize("entry", [x for x in RIGHT if x.name in RIGHT_SAMPLE], ids=_name)
def test_a_sample_of_right_attentions_passes_the_quick_cells(entry):
    report = _check(entry, "bf16", quick=True)
    assert report.passed, report.sentence


@pytest.mark.parametrize(
    "entry", one_in(2, (x for x in WRONG if x.name in WRONG_SAMPLE)), ids=_name
)
def test_a_sample_of_wrong_attentions_fails_and_is_named(entry):
    report = check_attention(entry.function, dtypes=["bf16"], cells=FEW, name=entry.name)
    assert not report.passed
    assert _named(entry, report), report.sentence


def test_a_mistake_whose_errors_are_ten_million_roundings_is_named_in_fp32():
    (entry,) = (x for x in WRONG if x.name == "strides ignored")
    strided = [x for x in QUICK if x.strided][:1]
    report = check_attention(entry.function, dtypes=["fp32"], cells=strided, name=entry.name)
    assert "strides of" in report.sentence, report.sentence


def test_the_samples_are_in_the_zoo():
    assert {x.name for x in RIGHT} >= RIGHT_SAMPLE
    assert {x.name for x in WRONG} >= WRONG_SAMPLE


@pytest.mark.long
@pytest.mark.parametrize(("entry", "format"), _in_their_dtypes(RIGHT))
def test_every_right_attention_passes(entry, format):
    report = _check(entry, format, quick=False)
    assert report.passed, report.sentence


@pytest.mark.long
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("format", DTYPES)
def test_every_wrong_attention_fails_and_nine_in_ten_are_named(format, quick):
    wrong = [entry for entry in WRONG if DTYPES[format] in entry.dtypes]
    reports = [(entry, _check(entry, format, quick)) for entry in wrong]
    assert not [report.sentence for _, report in reports if report.passed]
    unnamed = [report.sentence for entry, report in reports if not _named(entry, report)]
    assert len(unnamed) <= (1 - NAMED) * len(reports), "\n".join(unnamed)
