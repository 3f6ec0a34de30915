"""FA2 against FA3: equal but beside a reference that is one of them, at a size of seconds."""

from stability.report.paper.style import paper_style


def errors(rows, reference, candidate):
    return [
        row["rel_fro"]
        for row in rows
        if (row["reference"], row["candidate"]) == (reference, candidate)
    ]


def test_the_reference_alone_makes_the_difference(experiment):
    found = experiment.measure(experiment.SIZES["quick"])
    assert all(test.holds for test in found.tests), [test.found for test in found.tests]
    assert [test.control for test in found.tests] == [False] * 3 + [True] * 5
    for reference, bound in (("FP64", 1e-4), ("FP32", 1e-4), ("plain BF16", 1e-3)):
        fa2, fa3 = (errors(found.rows, reference, name) for name in ("fa2", "fa3"))
        assert len(fa2) == 5
        assert all(abs(one - other) < bound for one, other in zip(fa2, fa3, strict=True))
        # BF16's half spacing is 2e-3 to 4e-3 of a value: P and out are rounded to it
        assert 1e-3 < min(fa2) < max(fa3) < 1e-2
    assert errors(found.rows, "fa2", "fa2") == errors(found.rows, "fa3", "fa3") == [0.0] * 5
    assert max(errors(found.rows, "fa2", "fa2, another build")) < 2e-4
    assert min(errors(found.rows, "fa2", "fa3")) > 1e-3
    with paper_style():
        (axes,) = experiment.draw(found.rows).axes
    assert axes.get_xlabel() == "relative Frobenius error of out"
    assert {"FP64", "FP32", "plain BF16", "fa2", "fa3"} <= {
        label.get_text() for label in axes.get_yticklabels()
    }
