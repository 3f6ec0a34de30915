"""Flash against baseline attention by format: the direction, at a size of seconds."""


def test_difference_falls_with_mantissa_bits(experiment):
    found = experiment.measure(experiment.SIZES["quick"])
    falls, rerun = found.tests
    assert falls.holds, falls.found
    assert rerun.holds, rerun.found
    assert len(found.rows) == 4 * 5
