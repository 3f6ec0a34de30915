"""The cases of arXiv 2510.04212 on rows whose maximum repeats: with a bias, without one, cured.

Each case is measured with two sets of rounding points. `ALL` rounds P, P v and O to BF16, as BF16
training does. `ALONE` rounds the product P v and nothing else, which shows that this is where the
bias arises. Statistics are FP32 in both. The rows and the measurement are `stability.probe`'s.
"""

from collections.abc import Sequence
from typing import Any

from stability.probe.published_presets import TiedRows, tie_bias

__all__ = ["ALL", "ALONE", "DOWN", "UP", "beta_case", "tie_rows"]

ALONE, ALL = "P v", "P, P v, O"
POINTS = {ALONE: {"probabilities": "fp32", "output": "fp32"}, ALL: {}}
"""What is rounded to BF16, as changes of the profile `stabilised`."""
UP, DOWN = "two ones, v > 0", "two ones, v < 0"
_FAILING = {"repeated_max_beta": 1}
CASES: dict[str, tuple[TiedRows, int, dict[str, Any]]] = {
    UP: ("tied", 1, _FAILING),
    DOWN: ("tied", -1, _FAILING),
    "no residuals": ("no_residual", 1, _FAILING),
    "mixed residuals": ("mixed_residuals", 1, _FAILING),
    "mixed residuals, O FP32": (
        "mixed_residuals",
        1,
        {**_FAILING, "output": "fp32"},
    ),
    "a single one": ("untied", 1, _FAILING),
    "P v in FP32": ("tied", 1, {**_FAILING, "accumulator": "fp32"}),
    "P v, O in FP32": ("tied", 1, {**_FAILING, "accumulator": "fp32", "output": "fp32"}),
}
"""By case: the kind of rows, the sign of v, and the changes of the numerics.

With residuals of both signs ("mixed") O has a bias of 0.05 ULP of its own: the row sum l holds the
residuals, but O, which is rounded again, drops what they take away.
"""


def beta_case(beta: int) -> str:
    """Return the name of the case in which a repeated maximum is multiplied by `beta`."""
    return f"beta {beta}"


def tie_rows(
    *, heads: int, betas: Sequence[int], seeds: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Measure each case, and each of `betas` on the failing rows, at both sets of points.

    A row has the case, the points, the seed, and in ULPs of out: `bias_ulp`, `mean_abs_ulp`,
    `delta_ulp` and `delta_from_p_ulp` (`TieBias`).
    """
    cured = {beta_case(beta): ("tied", 1, {"repeated_max_beta": beta}) for beta in betas}
    figures = ("bias_ulp", "mean_abs_ulp", "delta_ulp", "delta_from_p_ulp")
    found = []
    for case, (rows, sign, changes) in {**CASES, **cured}.items():
        for points, rounded in POINTS.items():
            numerics = tuple({**rounded, **changes}.items())
            for seed in range(seeds):
                measured = tie_bias(
                    "stabilised",
                    numerics,
                    "auto",
                    sign,
                    heads=heads,
                    seed=seed,
                    rows=rows,
                    device=device,
                )
                values = {figure: getattr(measured, figure) for figure in figures}
                found.append({"case": case, "points": points, "seed": seed, **values})
    return found
