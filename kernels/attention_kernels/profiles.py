"""Named numerics: values only, each with its source in `kernels/README.md`."""

from attention_kernels.numerics import (
    BackwardNumerics,
    BaselineNumerics,
    FlashNumerics,
    ForwardNumerics,
)

__all__ = ["BASELINE_PROFILES", "PROFILES"]


def _flash_all(name: str) -> FlashNumerics:
    return FlashNumerics(
        forward=ForwardNumerics(
            operands=name,
            scores=name,
            statistics=name,
            probabilities=name,
            accumulator=name,
            output=name,
            lse=name,
        ),
        backward=BackwardNumerics(
            delta=name,
            dp=name,
            ds=name,
            dq_accumulator=name,
            dkv_accumulator=name,
            gradients=name,
        ),
    )


PROFILES: dict[str, FlashNumerics] = {
    "fa2": FlashNumerics(),
    "all_bf16": _flash_all("bf16"),
    "golden": _flash_all("fp64"),
}

BASELINE_PROFILES: dict[str, BaselineNumerics] = {
    "plain": BaselineNumerics(),
    "golden": BaselineNumerics(scores="fp64", softmax="fp64", output="fp64"),
}
