"""The precisions that an arm may train in, by name.

Five are PyTorch's own, as Lightning names them. `emulated:<format>` is ours: the matmuls' operands
and outputs are rounded to any format that FP32 holds, and multiplied in FP32, so that an FP16 or
FP8 run is affordable where no hardware has it. Leaves out how a name is carried out
(`model.precision`).
"""

from attention_kernels.formats import FORMATS, Format, format_named
from stability.config.convert import nearest

__all__ = ["EMULATED", "NATIVE", "check_precision", "emulated_format"]

NATIVE = ("64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed")
EMULATED = "emulated:"
"""Opens the name of a precision that is emulated; a format's name follows."""


def check_precision(name: str) -> None:
    """ValueError unless `name` is a native precision or `emulated:` and a format within FP32."""
    if name not in NATIVE and not name.startswith(EMULATED):
        raise ValueError(
            f"precision: must be a known name or {EMULATED}<format>, got {name!r}; "
            f"nearest: {nearest(name, NATIVE)}"
        )
    emulated_format(name)


def emulated_format(name: str) -> Format | None:
    """Return the format that the precision `name` emulates, None if it is native.

    ValueError if there is no such format, or if FP32 does not hold it.
    """
    if not name.startswith(EMULATED):
        return None
    try:
        format = format_named(name.removeprefix(EMULATED))
    except ValueError as error:
        raise ValueError(f"precision: {error}, in {name!r}") from error
    if not format.fits(FORMATS["fp32"]):
        raise ValueError(
            f"precision: must emulate a format that FP32 holds, got {name!r}; use 64-true"
        )
    return format
