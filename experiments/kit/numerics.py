"""Numerics that several experiments measure and that are no profile."""

from attention_kernels import BASELINE_PROFILES, PROFILES, BaselineNumerics, FlashNumerics

__all__ = ["round_everywhere"]


def round_everywhere(format: str) -> tuple[FlashNumerics, BaselineNumerics]:
    """Return flash and baseline numerics that round to `format` at every rounding point.

    The harshest reading of "at BF16" in arXiv 2405.02803; `all_bf16` is its flash at BF16. The
    baseline's softmax is rounded once, at its end, as PyTorch's is.
    """
    flash, baseline = PROFILES["golden"], BASELINE_PROFILES["golden"]
    points, baseline_points = (
        {name: format for name, value in numerics.to_dict().items() if value == "fp64"}
        for numerics in (flash, baseline)
    )
    return flash.with_(**points), baseline.with_(**baseline_points)
