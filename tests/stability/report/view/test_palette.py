"""Colours, dashes and markers for more arms than a palette holds."""

from stability.report.view.palette import arm_styles


def test_twenty_arms_are_told_apart():
    styles = arm_styles(["baseline", *(f"arm{n}" for n in range(20))])
    assert len(set(styles.values())) == 21
