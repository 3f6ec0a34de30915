"""Made-up figures of planted faults, for tests of what counts as found."""

import numpy as np

from stability.analysis.sequential import look_alpha
from stability.config.study import PolicyConfig
from stability.records.assay import FaultRecord

POLICY = PolicyConfig()
ALPHA = look_alpha(POLICY.alpha)


def operator_of(ratio=1.0, gain=0.0, bias=0.0, spread=0.1, count=15):
    """Figures of four results; only dq's are those that are given."""
    dice = np.random.default_rng(0)
    noise = dice.normal(size=(4, 3, count))
    found = {}
    for index, result in enumerate(("out", "dq", "dk", "dv")):
        mine = result == "dq"
        found[result] = {
            "error_ratio": tuple((ratio if mine else 1.0) * np.exp(spread * noise[index, 0])),
            "gain": tuple((gain if mine else 0.0) + 1e-4 * noise[index, 1]),
            "golden_bias_ulp": tuple((bias if mine else 0.0) + 2e-3 * noise[index, 2]),
        }
    return found


def a_fault(name="dq_gain", levels=("operator",), operator=None, **figures):
    return FaultRecord(
        name=name,
        what="a factor",
        levels=levels,
        operator=operator or operator_of(),
        **figures,
    )


def own_of(ratios=(1.0, 1.1, 0.95), share=0.0, share_se=0.002):
    return {"own_ratios": ratios, "own_share": share, "own_share_se": share_se}


def gradient_of(ratios, share=0.0, share_se=0.002):
    figures = {"ratios": ratios, "share": share, "share_se": share_se, "share_looks": len(ratios)}
    return figures | own_of()


def ratios_around(ratio, spread, count):
    """Ratios with this geometric mean, whose logs scatter."""
    dice = np.random.default_rng(1).normal(size=count)
    return tuple(ratio * np.exp(spread * (dice - dice.mean()) / dice.std(ddof=1)))


OWN = a_fault("", ())
