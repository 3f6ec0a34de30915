"""Names what tensor cores do to a sum of products, as published measurements found it.

The instruction D = A B + C is no sum in FP32. For each element of D, tensor cores take a block of
products at a time along K, exact, together with the accumulator. They shift all of these terms to
the largest exponent among them, cut off what lies more than `fraction_bits` bits below it, add what
is left exactly, and cut the sum to the accumulator's format. The next block starts from that.
MODELS is the table of what differs between architectures and operand formats:

- The exponent of a product is the sum of its operands' exponents, not normalised, so a product may
  reach 4 in units of it. Subnormal operands have the exponent of the smallest normal value.
- A term that is zero counts as one of exponent `zero_exponent`.
- Nothing is rounded to nearest.

Sources. V100, T4 and A100 were measured by Fasi, Higham, Mikaitis and Pranesh (PeerJ Computer
Science 7:e330, 2021). The parameters are those of MMA-Sim (arXiv 2511.10909) and of the models that
Khattak and Mikaitis published with arXiv 2512.07004; both compared theirs with the hardware, to the
bit, on random operands. Where both have a row, they agree. Where sources differ, or are silent:

- FP8 on Hopper. The first models of arXiv 2512.07004 kept 25 fraction bits, of the warp-level
  instruction, which Hopper executes on FP16 tensor cores. The later ones keep 13, as MMA-Sim does
  for the warp-group instruction (`wgmma`), the one that GEMMs use. The table has the latter.
- Which way negative terms are cut. Both models cut toward zero. DeepSeek-V3's report (arXiv
  2412.19437, section 3.5.2) speaks of a sign-filling shift, which would cut downward; it gives 14
  bits, which are the 13 and the leading one.
- `zero_exponent` is MMA-Sim's; arXiv 2512.07004 has it for Hopper and Blackwell.

`benchmarks/tensor_core_probe.py` compares a GPU with its rows; an H200 has the bits of `hopper_*`,
which cut toward zero (`kernels/README.md`).

This module computes nothing (`tensor_core` does). It imports no torch, as `numerics` does not.
Not modelled: FP16 accumulators, FP64 (which is IEEE's), block-scaled instructions, AMD's cores.
"""

import difflib
from dataclasses import dataclass

from attention_kernels.formats import FORMATS, Format, format_named

__all__ = ["MODELS", "TensorCoreModel", "tensor_core_named"]

CUTS = ("toward_zero", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCoreModel:
    """What one kind of tensor core adds up. ValueError for fields that contradict one another."""

    name: str
    operands: tuple[str, ...]
    """The formats that both operands may have; each may have another of them."""
    products: int
    """How many products are added to the accumulator at once, along K."""
    fraction_bits: int
    """How many bits below the largest exponent a term keeps when it is aligned."""
    accumulator: str = "fp32"
    """The format that the sum is cut to, toward zero, in FP32 registers."""
    cut: str = "toward_zero"
    """Which way a term is cut when it is aligned: `toward_zero`, or `down` (two's complement)."""
    zero_exponent: int
    """The exponent of a term that is zero, below which nothing is aligned."""
    wider: str = ""
    """The model of the same architecture for operands that this one does not take, if any."""
    source: str
    """Who measured it."""

    def __post_init__(self) -> None:
        for name in (*self.operands, self.accumulator):
            format_named(name)
        _require(self, "operands", len(self.operands) > 0, "a tuple of at least one format")
        _require(self, "products", self.products >= 1, "at least 1")
        # 4 * 2**fraction_bits from each term, added in FP64
        fits = self.fraction_bits >= 1 and self.products * 2 ** (self.fraction_bits + 2) < 2**52
        _require(self, "fraction_bits", fits, "from 1 to what FP64 adds exactly")
        _require(self, "cut", self.cut in CUTS, f"one of {', '.join(CUTS)}")
        held = format_named(self.accumulator).fits(FORMATS["fp32"])
        _require(self, "accumulator", held, "a format that FP32 holds")

    def operand_format(self, name: str) -> Format | None:
        """Return the first of the model's formats that holds every value of `name`, or None."""
        format = format_named(name)
        return next((f for f in map(format_named, self.operands) if format.fits(f)), None)

    def takes(self, name: str) -> bool:
        """Say whether operands of this format can be multiplied; wider ones become TF32 before."""
        return "tf32" in self.operands or self.operand_format(name) is not None


def _require(model: TensorCoreModel, field: str, right: bool, rule: str) -> None:
    if not right:
        raise ValueError(
            f"TensorCoreModel: {field} must be {rule}, got {getattr(model, field)!r} in "
            f"{model.name!r}"
        )


_FP8 = ("e4m3", "e5m2")
_FASI = "PeerJ CS 7:e330; arXiv 2511.10909; arXiv 2512.07004"
_BOTH = "arXiv 2511.10909; arXiv 2512.07004"
_HOPPER_FP8 = "arXiv 2511.10909; arXiv 2512.07004; arXiv 2412.19437"


def _table(
    *rows: tuple[str, tuple[str, ...], int, int, str, int, str, str],
) -> dict[str, TensorCoreModel]:
    return {
        name: TensorCoreModel(
            name=name,
            operands=operands,
            products=products,
            fraction_bits=fraction_bits,
            accumulator=accumulator,
            zero_exponent=zero_exponent,
            wider=wider,
            source=source,
        )
        for (
            name,
            operands,
            products,
            fraction_bits,
            accumulator,
            zero_exponent,
            wider,
            source,
        ) in rows
    }


MODELS: dict[str, TensorCoreModel] = _table(
    ("volta_fp16", ("fp16",), 4, 23, "fp32", -131, "", _FASI),
    ("turing_fp16", ("fp16",), 8, 24, "fp32", -132, "", "PeerJ CS 7:e330; arXiv 2511.10909"),
    ("ampere_fp16", ("fp16",), 8, 24, "fp32", -132, "", _FASI),
    ("ampere_bf16", ("bf16",), 8, 24, "fp32", -132, "", _FASI),
    ("ampere_tf32", ("tf32",), 4, 24, "fp32", -132, "", _FASI),
    ("ada_bf16", ("bf16",), 8, 24, "fp32", -132, "", _BOTH),
    ("ada_fp8", _FP8, 16, 13, "e8m13", -132, "ada_bf16", _BOTH),
    ("hopper_fp16", ("fp16",), 16, 25, "fp32", -133, "", _BOTH),
    ("hopper_bf16", ("bf16",), 16, 25, "fp32", -133, "", _BOTH),
    ("hopper_tf32", ("tf32",), 8, 25, "fp32", -133, "", _BOTH),
    ("hopper_fp8", _FP8, 32, 13, "e8m13", -133, "hopper_bf16", _HOPPER_FP8),
    ("blackwell_fp16", ("fp16",), 16, 25, "fp32", -133, "", _BOTH),
    ("blackwell_bf16", ("bf16",), 16, 25, "fp32", -133, "", _BOTH),
    ("blackwell_tf32", ("tf32",), 8, 25, "fp32", -133, "", _BOTH),
    ("blackwell_fp8", _FP8, 32, 25, "fp32", -133, "blackwell_bf16", _BOTH),
)
"""The tensor cores that somebody has measured, by name; all with an accumulator in FP32 registers.

`hopper_*` are warp-group instructions, `blackwell_*` those of data-centre chips (`tcgen05`), and
the others warp-level ones.
"""


def tensor_core_named(name: str) -> TensorCoreModel:
    """Return the model called `name`; ValueError, with the nearest names, for any other name."""
    if name not in MODELS:
        near = difflib.get_close_matches(str(name), MODELS, n=3, cutoff=0.4) or list(MODELS)
        raise ValueError(
            f"tensor_core_named: name must be a known tensor core, got {name!r}; nearest: "
            f"{', '.join(near)}"
        )
    return MODELS[name]
