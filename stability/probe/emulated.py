"""An attention's config in a run whose precision is emulated: "input" becomes that format.

There q, k and v are FP32 tensors with values on the format's grid, so their dtype no longer says
what the rounding points that follow the input should round to. Leaves out every other matrix
product (`model.emulated_linear`).
"""

from dataclasses import fields, replace

from attention_kernels import BASELINE_PROFILES, PROFILES, Format
from attention_kernels.numerics import BackwardNumerics
from stability.config.groups import AttentionConfig

__all__ = ["in_format"]


def in_format(config: AttentionConfig, format: Format | None) -> AttentionConfig:
    """Return `config` with each rounding point that follows the input at `format`; None: as it is.

    ValueError for an implementation whose inside can't be told a format.
    """
    if format is None:
        return config
    profiles = {"flash": (PROFILES, "fa2"), "baseline": (BASELINE_PROFILES, "plain")}
    if config.implementation not in profiles:
        raise ValueError(
            "attention.implementation must be flash or baseline where the precision is emulated, "
            f"got {config.implementation!r}; it can't be told to round to {format.name}"
        )
    known, default = profiles[config.implementation]
    numerics = known[config.profile or default].with_(**config.numerics)
    following = [name for name, value in numerics.to_dict().items() if value == "input"]
    backward = {field.name for field in fields(BackwardNumerics)}
    # a gradient beyond the format must show, or the loss scaler would never back off
    overflowing = format.name.removesuffix("-saturate")
    points = {name: overflowing if name in backward else format.name for name in following}
    return replace(config, numerics={**config.numerics, **points})
